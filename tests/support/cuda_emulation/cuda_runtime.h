#pragma once

#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

/// CUDA for the host compiler: enough of the runtime to run kernels in tests, one thread at a time.
///
/// A block's threads are fibers, which run until they wait for others; blocks run one after
/// another, in an order that can be chosen. Threads that wait for one another at different places,
/// or for one that has returned, end the process with a line that names the kernel, block and
/// thread. Global memory is the host's, so a sanitizer sees every access; shared memory is poisoned
/// beyond the size of the launch and filled with NaN before each block.

#define __global__
#define __device__
#define __host__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
extern unsigned char cuda_shared_memory[];

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
using cudaStream_t = struct CUstream_st*;
struct cudaLaunchAttribute;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

namespace cuda_emulation {

/// The order of blocks and, in a block, of threads between the places where they wait.
enum class Order { forward, backward, shuffled };
void set_order(Order order);

int64_t launches();  ///< so far

/// Where a thread waits.
struct Site {
  const char* file;
  int line;
  bool operator!=(const Site& other) const { return line != other.line || file != other.file; }
};

cudaError_t run(const cudaLaunchConfig_t& config, const void* kernel,
                const std::function<void()>& thread);
void wait_for_block(const Site& site);
/// What lane `source` of the warp brought to the same place; all lanes of `mask` come there.
uint64_t exchange(unsigned mask, uint64_t bits, int source, const Site& site);
int lane();

}  // namespace cuda_emulation

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const std::tuple<Parameters...> kept(std::forward<Arguments>(arguments)...);
  return cuda_emulation::run(*config, reinterpret_cast<const void*>(kernel),
                             [&] { std::apply(kernel, kept); });
}

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  cuda_emulation::wait_for_block({file, line});
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                  const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves 8 bytes at most");
  const int lane = cuda_emulation::lane();
  const int other = lane ^ lanes;
  const bool inside = other / width <= lane / width;
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = cuda_emulation::exchange(mask, bits, inside ? other : lane, {file, line});
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = static_cast<T>(before + value);
  return before;
}
template <typename T>
T atomicOr(T* at, T value) {
  const T before = *at;
  *at = before | value;
  return before;
}
template <typename T>
T atomicExch(T* at, T value) {
  const T before = *at;
  *at = value;
  return before;
}
inline void __threadfence() {}
inline void __threadfence_system() {}

template <typename T>
T __ldcg(const T* from) {
  return *from;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline float __int_as_float(int bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline long long __double_as_longlong(double value) {
  long long bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
