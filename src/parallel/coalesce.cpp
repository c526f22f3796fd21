#include "parallel/coalesce.h"

#include <ATen/core/grad_mode.h>

#include <map>
#include <utility>

namespace syncnorm {
namespace {

// Large enough that latency does not count, small enough that the copy does not double a model's
// memory.
constexpr int64_t kBroadcastBytes = int64_t{64} << 20;

}  // namespace

at::Tensor flatten(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  flat.reserve(tensors.size());
  for (const auto& tensor : tensors) flat.push_back(tensor.reshape(-1));
  return at::cat(flat);
}

void unflatten(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    tensor.copy_(flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

std::vector<std::vector<at::Tensor>> group_by_kind(const std::vector<at::Tensor>& tensors,
                                                   int64_t cap_bytes) {
  struct Open {
    std::vector<at::Tensor> tensors;
    int64_t bytes = 0;
  };

  std::map<std::pair<int, int>, Open> open;
  std::vector<std::vector<at::Tensor>> groups;
  for (const auto& tensor : tensors) {
    const int device = tensor.is_cpu() ? -1 : tensor.device().index();
    auto& group = open[{static_cast<int>(tensor.scalar_type()), device}];
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    if (!group.tensors.empty() && group.bytes + bytes > cap_bytes) {
      groups.push_back(std::exchange(group.tensors, {}));
      group.bytes = 0;
    }
    group.tensors.push_back(tensor);
    group.bytes += bytes;
  }
  for (auto& [kind, group] : open) groups.push_back(std::move(group.tensors));
  return groups;
}

void broadcast_coalesced(Communicator& comm, const std::vector<at::Tensor>& tensors, int root) {
  const at::NoGradGuard no_grad;
  for (const auto& group : group_by_kind(tensors, kBroadcastBytes)) {
    const auto flat = flatten(group);
    comm.broadcast(flat, root);
    // The root copies too: what a write to a saved tensor breaks then breaks on all ranks alike.
    unflatten(flat, group);
  }
}

}  // namespace syncnorm
