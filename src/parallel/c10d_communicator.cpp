#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "comm/reduction.h"
#include "syncnorm/process_group.h"

namespace syncnorm {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Communicates through a libtorch process group. Its ranks may be numbered otherwise there (see
/// split): `group_ranks[r]` is the process group's name for our rank r.
class C10dCommunicator final : public Communicator {
 public:
  C10dCommunicator(GroupPtr group, std::vector<int> group_ranks, int rank, std::string name)
      : Communicator(rank, group->getSize(), std::move(name)),
        group_(std::move(group)),
        group_ranks_(std::move(group_ranks)) {}

 protected:
  void do_all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    attempt([&] {
      std::vector<at::Tensor> wire{to_wire(tensor, reduction_dtype(tensor.scalar_type()))};
      c10d::AllreduceOptions options;
      options.reduceOp = op == ReduceOp::sum   ? c10d::ReduceOp::SUM
                         : op == ReduceOp::max ? c10d::ReduceOp::MAX
                                               : c10d::ReduceOp::MIN;
      group_->allreduce(wire, options)->wait();
      if (!wire.front().is_same(tensor)) tensor.copy_(wire.front().view(tensor.sizes()));
    });
  }

  at::Tensor do_all_gather(const at::Tensor& shard, at::IntArrayRef sizes) override {
    return attempt([&] {
      const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
      auto mine = to_wire(padded(shard, longest), shard.scalar_type()).view({-1});
      auto all = at::empty({size() * mine.numel()}, mine.options());
      group_->_allgather_base(all, mine)->wait();
      auto shape = shard.sizes().vec();
      shape[0] = longest;
      shape.insert(shape.begin(), size());
      const auto blocks = all.view(shape);
      std::vector<at::Tensor> rows;
      for (int r = 0; r < size(); ++r) {
        rows.push_back(blocks[group_ranks_[r]].narrow(0, 0, sizes[r]));
      }
      return at::cat(rows).to(shard.device());
    });
  }

  at::Tensor do_reduce_scatter(const at::Tensor& tensor, at::IntArrayRef sizes) override {
    return attempt([&] {
      const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
      std::vector<at::Tensor> blocks(size());
      const auto parts = tensor.split_with_sizes(sizes);
      for (int r = 0; r < size(); ++r) blocks[group_ranks_[r]] = padded(parts[r], longest);
      auto all = to_wire(at::cat(blocks), reduction_dtype(tensor.scalar_type())).view({-1});
      auto mine = at::empty({all.numel() / size()}, all.options());
      group_->_reduce_scatter_base(mine, all)->wait();
      auto shape = tensor.sizes().vec();
      shape[0] = longest;
      return mine.view(shape).narrow(0, 0, sizes[rank()]).to(tensor.options());
    });
  }

  void do_broadcast(const at::Tensor& tensor, int root) override {
    attempt([&] {
      std::vector<at::Tensor> wire{to_wire(tensor, tensor.scalar_type())};
      c10d::BroadcastOptions options;
      options.rootRank = group_ranks_[root];
      group_->broadcast(wire, options)->wait();
      if (!wire.front().is_same(tensor)) tensor.copy_(wire.front().view(tensor.sizes()));
    });
  }

  void do_barrier() override {
    attempt([&] { group_->barrier()->wait(); });
  }

  std::shared_ptr<Communicator> do_split(int color, int key) override;

 private:
  /// Calls `body`; what the process group throws becomes a CommunicationError, this library's own
  /// errors pass.
  template <typename Body>
  auto attempt(Body body) -> decltype(body()) {
    const at::NoGradGuard no_grad;
    try {
      return body();
    } catch (const CommunicationError&) {
      throw;
    } catch (const std::exception& error) {
      throw CommunicationError(describe_operation() +
                               " over a c10d process group failed: " + error.what());
    }
  }

  /// `tensor` as the process group can take it: contiguous, of `dtype`, where it reaches. Itself if
  /// that is what it is.
  at::Tensor to_wire(const at::Tensor& tensor, at::ScalarType dtype) const {
    return tensor.to(tensor.options().device(reachable(tensor.device())).dtype(dtype)).contiguous();
  }

  c10::Device reachable(c10::Device device) const {
    const auto types = group_->getDeviceTypes();
    for (const auto& type : types) {
      if (type.type() == device.type()) return device;
    }
    TORCH_CHECK(!types.empty(), "the process group has no backend");
    return group_->getBoundDeviceId().value_or(types.front());
  }

  static at::Tensor padded(const at::Tensor& rows, int64_t length) {
    if (rows.size(0) == length) return rows;
    auto shape = rows.sizes().vec();
    shape[0] = length;
    auto result = at::zeros(shape, rows.options());
    result.narrow(0, 0, rows.size(0)).copy_(rows);
    return result;
  }

  void check_splittable() const {
    for (const auto& device : group_->getDeviceTypes()) {
      const auto backend = group_->getBackend(device.type());
      TORCH_CHECK(backend->supportsSplitting() && group_->getStore() != nullptr, "split of ",
                  name(), ": the process group's backend ", backend->getBackendName(), " on ",
                  device,
                  " cannot split. Make the subgroup where the group was made (Python: "
                  "torch.distributed.new_group) and hand that to c10d_communicator, or use "
                  "mpi_communicator.");
    }
  }

  GroupPtr group_;
  std::vector<int> group_ranks_;
};

std::shared_ptr<Communicator> C10dCommunicator::do_split(int color, int key) {
  check_splittable();
  const auto wishes = do_all_gather(at::tensor({color, key}, at::kInt).view({1, 2}),
                                    std::vector<int64_t>(size(), 1));
  std::map<int, std::vector<std::pair<int, int>>> parts;
  for (int r = 0; r < size(); ++r) {
    const int wanted = wishes[r][0].item<int>();
    if (wanted >= 0) parts[wanted].emplace_back(wishes[r][1].item<int>(), r);
  }
  if (parts.empty()) return nullptr;
  // Backends split collectively, so a rank that joins none calls too, with a list it is not in.
  auto& members = parts[color < 0 ? parts.begin()->first : color];
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& member : members) ranks.push_back(group_ranks_[member.second]);
  auto sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  const auto label = c10::str(name(), "/split(", color < 0 ? parts.begin()->first : color, ")");
  return attempt([&]() -> std::shared_ptr<Communicator> {
    // A name of its own for each split: backends meet under it in the store.
    const auto unique = c10::str(label, "#", sequence());
    auto group = group_->splitGroup(sorted, std::nullopt, std::nullopt, unique, unique);
    if (color < 0) return nullptr;
    TORCH_CHECK(group != nullptr, "the backend returned no group");
    // splitGroup numbers by the parent's ranks, split by key: keep the translation.
    std::vector<int> numbers;
    int rank_there = 0;
    for (size_t i = 0; i < ranks.size(); ++i) {
      const auto place = std::lower_bound(sorted.begin(), sorted.end(), ranks[i]) - sorted.begin();
      numbers.push_back(static_cast<int>(place));
      if (members[i].second == rank()) rank_there = static_cast<int>(i);
    }
    return std::make_shared<C10dCommunicator>(std::move(group), std::move(numbers), rank_there,
                                              label);
  });
}

}  // namespace

std::shared_ptr<Communicator> c10d_communicator(GroupPtr process_group) {
  TORCH_CHECK(process_group != nullptr, "c10d_communicator: the process group is null.");
  std::vector<int> identity(process_group->getSize());
  std::iota(identity.begin(), identity.end(), 0);
  const int rank = process_group->getRank();
  const auto name = "c10d:" + process_group->getBackendName();
  return std::make_shared<C10dCommunicator>(std::move(process_group), std::move(identity), rank,
                                            name);
}

}  // namespace syncnorm
