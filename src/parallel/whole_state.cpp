#include <map>

#include "parallel/shard_checks.h"
#include "syncnorm/checkpoint.h"
#include "syncnorm/environment.h"

namespace syncnorm {
namespace {

using torch::Tensor;
using Tensors = torch::OrderedDict<std::string, Tensor>;

/// The whole of a tensor on every rank, on its device.
Tensor gather_whole(const ShardedTensor& item, Communicator& comm) {
  const auto& sharding = item.sharding;
  std::vector<int64_t> sizes;
  for (int r = 0; r < comm.size(); ++r) sizes.push_back(sharding.local_size(r));
  const auto shards = comm.all_gather(item.tensor.detach().movedim(sharding.dim, 0), sizes);
  auto shape = shards.sizes().vec();
  shape[0] = sharding.extent;
  auto whole = torch::empty(shape, shards.options());
  int64_t offset = 0;
  for (const auto& rank : sharding.ranges) {
    for (const auto& range : rank) {
      whole.narrow(0, range.offset, range.size).copy_(shards.narrow(0, offset, range.size));
      offset += range.size;
    }
  }
  return whole.movedim(0, sharding.dim).contiguous();
}

}  // namespace

Tensors gather_state_dict(const torch::nn::Module& module,
                          const std::shared_ptr<Communicator>& comm, bool everywhere) {
  constexpr const char* kWho = "gather_state_dict";
  const auto group = communicator_or_world(comm, kWho);
  const auto tensors = sharded_tensors(module);
  check_shards(tensors, *group, kWho);
  const ModuleScope scope(kWho);
  Tensors state;
  for (const auto& item : tensors) {
    const bool keep = everywhere || group->rank() == 0;
    if (item.sharding.replicated()) {
      if (keep)
        state.insert(item.name, item.tensor.detach().to(torch::kCPU, item.tensor.dtype(), false,
                                                        /*copy=*/true));
      continue;
    }
    const auto whole = gather_whole(item, *group);
    if (keep) state.insert(item.name, whole.cpu());
  }
  return state;
}

void load_whole_state_dict(torch::nn::Module& module, const Tensors& state) {
  const auto tensors = sharded_tensors(module);
  Mismatches problems;
  std::map<std::string, bool> wanted;
  for (const auto& [name, tensor, sharding] : tensors) {
    wanted[name] = true;
    const auto* given = state.find(name);
    const auto shape = sharding.whole_shape(tensor.sizes());
    if (given == nullptr) {
      problems.missing(name);
    } else if (given->sizes() != at::IntArrayRef(shape)) {
      problems.different(name, c10::str(given->sizes(), " given, ", at::IntArrayRef(shape),
                                        " whole in the module"));
    } else if (!convertible(given->scalar_type(), tensor.scalar_type())) {
      problems.different(
          name, c10::str(given->scalar_type(), " given, ", tensor.scalar_type(), " in the module"));
    }
  }
  for (const auto& item : state) {
    if (wanted.count(item.key()) == 0) problems.unexpected(item.key());
  }
  const auto text = problems.text();
  TORCH_CHECK(text.empty(), "load_whole_state_dict: the tensors do not fit the module.", text,
              " Nothing was changed.");
  const torch::NoGradGuard no_grad;
  for (const auto& item : tensors) {
    auto tensor = item.tensor;
    tensor.copy_(item.sharding.shard_of(state[item.name]));
  }
}

}  // namespace syncnorm
