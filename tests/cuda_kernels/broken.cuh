#pragma once

#include <cuda_runtime.h>

/// Kernels with one mistake each, which the emulation must find.
namespace syncnorm::kernels::cuda::testing {

constexpr int kBrokenThreads = 64;

/// to[0] = sum of the threads' numbers, but nobody waits until all have written theirs.
cudaError_t sum_without_barrier(double* to);
/// The same, rightly.
cudaError_t sum_with_barrier(double* to);
/// Half of the threads return before the barrier.
cudaError_t return_before_barrier();
/// Two halves wait at two barriers.
cudaError_t wait_at_two_barriers();
/// Half of a warp shuffles under the mask of all.
cudaError_t shuffle_half_a_warp();
/// A lane takes from one that its mask leaves out.
cudaError_t shuffle_beyond_mask();
/// Each thread reads one element too far.
cudaError_t read_beyond(const float* from, float* to);
/// Writes beyond the shared memory that the launch asked for.
cudaError_t write_beyond_shared();

}  // namespace syncnorm::kernels::cuda::testing
