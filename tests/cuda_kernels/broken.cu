#include "cuda_kernels/broken.cuh"

namespace syncnorm::kernels::cuda::testing {
namespace {

__global__ void sum_kernel(double* to, bool waits) {
  auto* shared = reinterpret_cast<double*>(cuda_shared_memory);
  shared[threadIdx.x] = threadIdx.x;
  if (waits) __syncthreads();
  if (threadIdx.x != 0) return;
  double sum = 0;
  for (int t = 0; t < kBrokenThreads; ++t) sum += shared[t];
  *to = sum;
}

__global__ void return_before() {
  if (threadIdx.x >= kBrokenThreads / 2) return;
  __syncthreads();
}

__global__ void wait_at_two() {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void shuffle_half() {
  if (threadIdx.x % 32 < 16) __shfl_xor_sync(~0u, 1., 1);
}

__global__ void shuffle_beyond() {
  if (threadIdx.x % 32 < 16) __shfl_xor_sync(0xffffu, 1., 16);
}

__global__ void read_too_far(const float* from, float* to) {
  to[threadIdx.x] = from[threadIdx.x + 1];
}

__global__ void write_too_far() { cuda_shared_memory[kBrokenThreads + threadIdx.x] = 1; }

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), size_t shared, Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(2);
  config.blockDim = dim3(kBrokenThreads);
  config.dynamicSmemBytes = shared;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace

cudaError_t sum_without_barrier(double* to) {
  return launch(sum_kernel, kBrokenThreads * sizeof(double), to, false);
}
cudaError_t sum_with_barrier(double* to) {
  return launch(sum_kernel, kBrokenThreads * sizeof(double), to, true);
}
cudaError_t return_before_barrier() { return launch(return_before, 0); }
cudaError_t wait_at_two_barriers() { return launch(wait_at_two, 0); }
cudaError_t shuffle_half_a_warp() { return launch(shuffle_half, 0); }
cudaError_t shuffle_beyond_mask() { return launch(shuffle_beyond, 0); }
cudaError_t read_beyond(const float* from, float* to) { return launch(read_too_far, 0, from, to); }
cudaError_t write_beyond_shared() { return launch(write_too_far, kBrokenThreads); }

}  // namespace syncnorm::kernels::cuda::testing
