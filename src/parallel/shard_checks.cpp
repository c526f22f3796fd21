#include "parallel/shard_checks.h"

#include <algorithm>
#include <set>

namespace syncnorm {
namespace {

void append(std::string& text, const char* title, const std::vector<std::string>& names) {
  constexpr size_t kShown = 8;
  if (names.empty()) return;
  text += std::string(" ") + title + ": ";
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) text += (i ? ", " : "") + names[i];
  if (names.size() > kShown) text += ", ... (" + std::to_string(names.size()) + " in all)";
  text += '.';
}

}  // namespace

void check_shards(const std::vector<ShardedTensor>& tensors, const Communicator& comm,
                  const std::string& who) {
  std::set<std::string> names;
  for (const auto& [name, tensor, sharding] : tensors) {
    TORCH_CHECK_VALUE(names.insert(name).second, who, ": the name '", name, "' appears twice");
    TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == torch::kStrided, who, ": '", name,
                      "' is not a dense tensor");
    if (sharding.replicated()) continue;
    TORCH_CHECK_VALUE(sharding.comm->size() == comm.size() && sharding.comm->rank() == comm.rank(),
                      who, ": '", name, "' is cut for ", sharding.comm->size(),
                      " ranks, the group given has ", comm.size());
    TORCH_CHECK_VALUE(tensor.dim() > sharding.dim &&
                          tensor.size(sharding.dim) == sharding.local_size(comm.rank()),
                      who, ": '", name, "' has shape ", tensor.sizes(), " on rank ", comm.rank(),
                      ", its sharding says ", sharding.local_size(comm.rank()), " along dimension ",
                      sharding.dim);
  }
}

std::string Mismatches::text() const {
  std::string result;
  append(result, "Missing", missing_);
  append(result, "Unexpected", unexpected_);
  append(result, "Different", different_);
  return result;
}

bool convertible(torch::ScalarType from, torch::ScalarType to) {
  return from == to || (c10::isFloatingType(from) && c10::isFloatingType(to));
}

}  // namespace syncnorm
