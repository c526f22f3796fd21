#include "syncnorm/sharding.h"

#include <algorithm>
#include <numeric>

namespace syncnorm {
namespace {

/// How many ranks hold each position of the whole.
std::vector<int> holders(const Sharding& sharding) {
  std::vector<int> count(sharding.extent, 0);
  for (const auto& rank : sharding.ranges)
    for (const auto& range : rank)
      for (int64_t i = 0; i < range.size; ++i) ++count[range.offset + i];
  return count;
}

void append_tensors(const torch::nn::Module& module, const std::string& prefix, bool buffers,
                    std::vector<ShardedTensor>& into) {
  const auto* parallel = dynamic_cast<const ParallelModule*>(&module);
  const auto add = [&](const auto& items) {
    for (const auto& item : items) {
      auto sharding = parallel != nullptr ? parallel->sharding_of(item.key()) : Sharding();
      into.push_back({prefix + item.key(), item.value(), std::move(sharding)});
    }
  };
  add(module.named_parameters(/*recurse=*/false));
  if (buffers) add(module.named_buffers(/*recurse=*/false));
  for (const auto& child : module.named_children())
    append_tensors(*child.value(), prefix + child.key() + ".", buffers, into);
}

}  // namespace

std::vector<int64_t> balanced_shards(int64_t total, int parts) {
  TORCH_CHECK_VALUE(total >= 0 && parts > 0, "balanced_shards: cannot cut ", total, " into ",
                    parts);
  std::vector<int64_t> sizes(parts, total / parts);
  for (int64_t i = 0; i < total % parts; ++i) ++sizes[i];
  return sizes;
}

Sharding Sharding::consecutive(std::shared_ptr<Communicator> comm, int64_t dim,
                               const std::vector<int64_t>& sizes) {
  TORCH_CHECK_VALUE(static_cast<int>(sizes.size()) == comm->size(), "one shard size for each of ",
                    comm->size(), " ranks is needed, got ", sizes.size());
  Sharding result;
  result.comm = std::move(comm);
  result.dim = dim;
  for (const int64_t size : sizes) {
    TORCH_CHECK_VALUE(size >= 0, "shard sizes cannot be negative: ", sizes);
    result.ranges.push_back({{result.extent, size}});
    result.extent += size;
  }
  return result;
}

int64_t Sharding::local_size(int rank) const {
  int64_t size = 0;
  for (const auto& range : ranges[rank]) size += range.size;
  return size;
}

std::vector<int64_t> Sharding::whole_shape(at::IntArrayRef shard_shape) const {
  auto shape = shard_shape.vec();
  if (!replicated()) shape.at(dim) = extent;
  return shape;
}

torch::Tensor Sharding::shard_of(const torch::Tensor& whole) const {
  if (replicated()) return whole;
  TORCH_CHECK_VALUE(whole.dim() > dim && whole.size(dim) == extent, "a whole tensor of ", extent,
                    " along dimension ", dim, " is needed, got ", whole.sizes());
  std::vector<torch::Tensor> parts;
  for (const auto& range : ranges[comm->rank()])
    parts.push_back(whole.narrow(dim, range.offset, range.size));
  return parts.empty() ? whole.narrow(dim, 0, 0).clone() : torch::cat(parts, dim);
}

torch::Tensor Sharding::copies() const {
  const auto count = holders(*this);
  auto result = torch::empty({local_size(comm->rank())}, torch::kDouble);
  auto* out = result.data_ptr<double>();
  for (const auto& range : ranges[comm->rank()])
    for (int64_t i = 0; i < range.size; ++i) *out++ = count[range.offset + i];
  return result;
}

std::vector<Range> Sharding::shared_ranges() const {
  std::vector<Range> shared;
  if (replicated()) return shared;
  const auto count = holders(*this);
  for (int64_t i = 0; i < extent; ++i) {
    if (count[i] < 2) continue;
    if (!shared.empty() && shared.back().offset + shared.back().size == i) {
      ++shared.back().size;
    } else {
      shared.push_back({i, 1});
    }
  }
  return shared;
}

std::vector<ShardedTensor> sharded_tensors(const torch::nn::Module& module, bool buffers) {
  std::vector<ShardedTensor> result;
  append_tensors(module, "", buffers, result);
  return result;
}

}  // namespace syncnorm
