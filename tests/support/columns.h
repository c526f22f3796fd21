#pragma once

#include <torch/torch.h>

#include <memory>
#include <vector>

#include "support/world.h"

namespace syncnorm::testing {

/// Rank `rank`'s columns (of the last dimension) of `whole`, a contiguous copy.
inline torch::Tensor columns_of(const torch::Tensor& whole, const std::vector<int64_t>& sizes,
                                int rank) {
  if (!whole.defined()) return {};
  int64_t start = 0;
  for (int r = 0; r < rank; ++r) start += sizes[r];
  return whole.narrow(-1, start, sizes[rank]).contiguous().clone();
}

/// The ranks' columns side by side.
inline torch::Tensor gather_columns_of(Communicator& comm, const torch::Tensor& shard,
                                       const std::vector<int64_t>& sizes) {
  const auto gathered = comm.all_gather(shard.detach().movedim(-1, 0).contiguous(), sizes);
  return gathered.movedim(0, -1).contiguous();
}

}  // namespace syncnorm::testing
