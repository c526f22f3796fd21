#pragma once

#include <torch/torch.h>

#include <random>
#include <vector>

namespace syncnorm::testing {

/// Random sizes of `parts` shards, some of them empty, that add up to `total`; the same for the
/// same generator state.
inline std::vector<int64_t> random_shards(int64_t total, int parts, std::mt19937& generator) {
  std::vector<int64_t> sizes(parts, 0);
  std::uniform_int_distribution<int> pick(0, parts - 1);
  for (int64_t i = 0; i < total; ++i) ++sizes[pick(generator)];
  return sizes;
}

/// Rank `rank`'s rows of `whole`, contiguous copies in the memory format of `whole`.
inline torch::Tensor shard_of(const torch::Tensor& whole, const std::vector<int64_t>& sizes,
                              int rank) {
  int64_t start = 0;
  for (int r = 0; r < rank; ++r) start += sizes[r];
  return whole.narrow(0, start, sizes[rank]).clone(whole.suggest_memory_format());
}

}  // namespace syncnorm::testing
