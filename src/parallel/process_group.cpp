#include "syncnorm/process_group.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "parallel/coalesce.h"
#include "parallel/collective_queue.h"

namespace syncnorm {
namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr const char* kBackendName = "syncnorm";

/// How a c10d reduction is done: by one of a Communicator's, then perhaps a division.
struct Reduction {
  ReduceOp op = ReduceOp::sum;
  bool average = false;
};

Reduction reduction_of(const c10d::ReduceOp& op, const Tensors& tensors) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return {ReduceOp::sum, false};
    case c10d::ReduceOp::MAX:
      return {ReduceOp::max, false};
    case c10d::ReduceOp::MIN:
      return {ReduceOp::min, false};
    case c10d::ReduceOp::AVG:
      for (const auto& tensor : tensors) {
        TORCH_CHECK(tensor.is_floating_point(), "syncnorm process group: AVG of ",
                    tensor.scalar_type(), " is not defined; reduce with SUM and divide.");
      }
      return {ReduceOp::sum, true};
    default:
      TORCH_CHECK(false, "syncnorm process group: reduction ", static_cast<int>(op.op_),
                  " (c10d::ReduceOp) is not offered; SUM, AVG, MAX and MIN are.");
  }
}

void reduce_in_place(Communicator& comm, const at::Tensor& tensor, Reduction reduction) {
  comm.all_reduce(tensor, reduction.op);
  if (reduction.average) tensor.div_(comm.size());
}

void check_dense(const char* operation, const Tensors& tensors) {
  TORCH_CHECK(!tensors.empty(), "syncnorm process group: ", operation, " of no tensor.");
  for (const auto& tensor : tensors) {
    TORCH_CHECK(tensor.layout() == at::kStrided, "syncnorm process group: ", operation, " of a ",
                tensor.layout(), " tensor is not offered; give it dense.");
  }
}

std::vector<int64_t> element_counts(const Tensors& tensors) {
  std::vector<int64_t> counts;
  for (const auto& tensor : tensors) counts.push_back(tensor.numel());
  return counts;
}

Tensors joined(Tensors first, const Tensors& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// Runs collectives over a Communicator of its own on a CollectiveQueue.
class CommunicatorBackend final : public c10d::Backend {
 public:
  explicit CommunicatorBackend(std::shared_ptr<Communicator> comm)
      : c10d::Backend(comm->rank(), comm->size()), queue_(std::move(comm)) {}

  const std::string getBackendName() const override { return kBackendName; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(kBackendName);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    check_dense("allreduce", tensors);
    const auto reduction = reduction_of(opts.reduceOp, tensors);
    return push(OpType::ALLREDUCE, tensors, tensors, [tensors, reduction](Communicator& comm) {
      for (const auto& tensor : tensors) reduce_in_place(comm, tensor, reduction);
    });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    check_dense("allreduce_coalesced", tensors);
    const auto reduction = reduction_of(opts.reduceOp, tensors);
    const auto body = [tensors, reduction](Communicator& comm) {
      for (const auto& same : group_by_kind(tensors, std::numeric_limits<int64_t>::max())) {
        const auto flat = flatten(same);
        reduce_in_place(comm, flat, reduction);
        unflatten(flat, same);
      }
    };
    return push(OpType::ALLREDUCE_COALESCED, tensors, tensors, body);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    check_dense("broadcast", tensors);
    TORCH_CHECK(opts.rootRank >= 0 && opts.rootRank < getSize(),
                "syncnorm process group: broadcast from rank ", opts.rootRank, " of ", getSize(),
                ".");
    const int root = static_cast<int>(opts.rootRank);
    return push(OpType::BROADCAST, tensors, tensors, [tensors, root](Communicator& comm) {
      for (const auto& tensor : tensors) comm.broadcast(tensor, root);
    });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& /*opts*/) override {
    check_dense("allgather", inputs);
    check_lists("allgather", outputs, inputs);
    const auto into = outputs.front();
    const auto mine = inputs.front();
    const auto body = [into, mine](Communicator& comm) {
      unflatten(comm.all_gather(mine.reshape(-1), element_counts(into)), into);
    };
    return push(OpType::ALLGATHER, joined(into, inputs), into, body);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& /*opts*/) override {
    check_dense("_allgather_base", {output, input});
    TORCH_CHECK(output.numel() == input.numel() * getSize(),
                "syncnorm process group: _allgather_base of ", input.numel(), " elements on ",
                getSize(), " ranks into ", output.numel(), ".");
    const auto body = [output, input](Communicator& comm) {
      const std::vector<int64_t> sizes(comm.size(), input.numel());
      unflatten(comm.all_gather(input.reshape(-1), sizes), {output});
    };
    return push(OpType::_ALLGATHER_BASE, {output, input}, {output}, body);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    check_dense("reduce_scatter", outputs);
    check_lists("reduce_scatter", inputs, outputs);
    const auto reduction = reduction_of(opts.reduceOp, outputs);
    const auto from = inputs.front();
    const auto into = outputs.front();
    return push(OpType::REDUCE_SCATTER, joined(from, outputs), {into},
                [from, into, reduction](Communicator& comm) {
                  scatter_reduced(comm, flatten(from), element_counts(from), into, reduction);
                });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    check_dense("_reduce_scatter_base", {output, input});
    TORCH_CHECK(input.numel() == output.numel() * getSize(),
                "syncnorm process group: _reduce_scatter_base of ", input.numel(), " elements on ",
                getSize(), " ranks into ", output.numel(), ".");
    const auto reduction = reduction_of(opts.reduceOp, {output});
    return push(OpType::_REDUCE_SCATTER_BASE, {output, input}, {output},
                [output, input, reduction](Communicator& comm) {
                  const std::vector<int64_t> sizes(comm.size(), output.numel());
                  scatter_reduced(comm, input.reshape(-1), sizes, output, reduction);
                });
  }

  WorkPtr barrier(const c10d::BarrierOptions& /*opts*/) override {
    return push(OpType::BARRIER, {}, {}, [](Communicator& comm) { comm.barrier(); });
  }

  bool supportsSplitting() const override { return true; }

  /// Collective over the whole group: every rank calls it, each with the list of its own new group.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& /*opts*/) override {
    // ProcessGroup::splitGroup asks once for each device type, and one backend (or none) serves
    // them all.
    if (store != nullptr && store == split_store_) return split_result_.lock();
    const auto position = std::find(ranks.begin(), ranks.end(), getRank());
    const bool member = position != ranks.end();
    const int color = member ? *std::min_element(ranks.begin(), ranks.end()) : -1;
    const int key = static_cast<int>(position - ranks.begin());
    std::shared_ptr<Communicator> part;
    push(OpType::UNKNOWN, {}, {}, [&](Communicator& comm) {
      part = comm.split(color, key);
    })->wait();
    c10::intrusive_ptr<Backend> backend;
    if (member) backend = c10::make_intrusive<CommunicatorBackend>(std::move(part));
    split_store_ = store;
    split_result_ = backend;
    return backend;
  }

 private:
  template <typename Body>
  WorkPtr push(OpType op, const Tensors& touched, const Tensors& outputs, Body body) {
    auto work =
        c10::make_intrusive<CommunicatorWork>(getRank(), op, std::move(body), touched, outputs);
    queue_.push(work);
    return work;
  }

  void check_lists(const char* operation, const std::vector<Tensors>& lists,
                   const Tensors& singles) const {
    TORCH_CHECK(singles.size() == 1 && lists.size() == 1, "syncnorm process group: ", operation,
                " takes one tensor and one list, got ", singles.size(), " and ", lists.size(), ".");
    TORCH_CHECK(static_cast<int>(lists.front().size()) == getSize(),
                "syncnorm process group: ", operation, " takes a list of ", getSize(),
                " tensors, one a rank, got ", lists.front().size(), ".");
    check_dense(operation, lists.front());
    TORCH_CHECK(lists.front()[getRank()].numel() == singles.front().numel(),
                "syncnorm process group: ", operation, " with ", singles.front().numel(),
                " elements on rank ", getRank(), ", whose place in the list has ",
                lists.front()[getRank()].numel(), ".");
  }

  static void scatter_reduced(Communicator& comm, const at::Tensor& flat,
                              const std::vector<int64_t>& sizes, const at::Tensor& into,
                              Reduction reduction) {
    if (reduction.op == ReduceOp::sum) {
      unflatten(comm.reduce_scatter(flat, sizes), {into});
      if (reduction.average) into.div_(comm.size());
      return;
    }
    const auto whole = flat.clone();
    comm.all_reduce(whole, reduction.op);
    int64_t offset = 0;
    for (int r = 0; r < comm.rank(); ++r) offset += sizes[r];
    unflatten(whole.narrow(0, offset, sizes[comm.rank()]), {into});
  }

  CollectiveQueue queue_;
  c10::intrusive_ptr<c10d::Store> split_store_;
  c10::weak_intrusive_ptr<c10d::Backend> split_result_{c10::intrusive_ptr<c10d::Backend>()};
};

}  // namespace

c10::intrusive_ptr<c10d::ProcessGroup> as_process_group(const std::shared_ptr<Communicator>& comm) {
  TORCH_CHECK(comm != nullptr, "as_process_group: the communicator is null.");
  const auto duplicate = comm->split(0, comm->rank());
  // splitGroup wants a store for rendezvous, which a split of ours does not use: one of this
  // process will do.
  auto group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(),
                                                       comm->rank(), comm->size());
  auto backend = c10::make_intrusive<CommunicatorBackend>(duplicate);
  using BackendType = c10d::ProcessGroup::BackendType;
  group->setDefaultBackend(BackendType::CUSTOM);
  group->setBackend(c10::kCPU, BackendType::CUSTOM, backend);
  group->setBackend(c10::kCUDA, BackendType::CUSTOM, backend);
  group->setGroupName(duplicate->name());
  group->setGroupDesc("syncnorm over " + comm->name());
  return group;
}

}  // namespace syncnorm
