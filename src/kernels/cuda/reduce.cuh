#pragma once

#include "kernels/cuda/device.cuh"

/// Sums across threads and blocks: double, in an order that depends on sizes alone.
namespace syncnorm::kernels::cuda {

struct Sums {
  double first = 0;
  double second = 0;
};

/// The sum over each `team` lanes, a power of two, in all of them. The whole warp takes part.
__device__ inline Sums sum_of_team(Sums sums, int team) {
  for (int step = team / 2; step > 0; step /= 2) {
    sums.first += __shfl_xor_sync(~0u, sums.first, step);
    sums.second += __shfl_xor_sync(~0u, sums.second, step);
  }
  return sums;
}

struct BlockShared {
  Sums of_warps[kThreads / kWarp];
  int is_last;
};

/// The sum over the block, in its first thread. `shared` may be used again at once.
__device__ inline Sums sum_of_block(Sums sums, BlockShared& shared) {
  sums = sum_of_team(sums, kWarp);
  if (this_thread() % kWarp == 0) shared.of_warps[this_thread() / kWarp] = sums;
  __syncthreads();
  Sums total;
  if (this_thread() == 0)
    for (const auto& of_warp : shared.of_warps) {
      total.first += of_warp.first;
      total.second += of_warp.second;
    }
  __syncthreads();
  return total;
}

/// Whether this block is the last of `blocks` to come here; then it sees what the others had
/// written to global memory, if read by load_partial(), and the counter is zero again.
__device__ inline bool arrives_last(int32_t* counter, int blocks, int& is_last) {
  __threadfence();
  __syncthreads();
  if (this_thread() == 0) {
    is_last = atomicAdd(counter, 1) == blocks - 1;
    if (is_last) *counter = 0;
  }
  __syncthreads();
  const bool last = is_last != 0;
  if (last) __threadfence();
  return last;
}

/// Past the first-level cache, which other blocks' writes do not reach.
__device__ inline double load_partial(const double* from) { return __ldcg(from); }

}  // namespace syncnorm::kernels::cuda
