#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/launch.h"

/// A block's shared memory, of which its launch said the size.
extern __shared__ __align__(16) unsigned char cuda_shared_memory[];

/// What all kernels are made of: element types, vectors of 16 bytes, values whose dtype is known
/// at run time, and launching.
namespace syncnorm::kernels::cuda {

constexpr int kThreads = 256;  // of every block
constexpr int kWarp = 32;
constexpr int kTogether = 4;  // vectors that a thread has on their way at once

/// The dtype of computation: float for half types.
template <typename T>
struct compute {
  using type = float;
};
template <>
struct compute<double> {
  using type = double;
};
template <typename T>
using compute_t = typename compute<T>::type;

__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }
__device__ inline float widen(__half value) { return __half2float(value); }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ inline T narrow(compute_t<T> value) {
  return value;
}
template <>
__device__ inline __half narrow<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

__device__ inline float not_a_number(float) { return __int_as_float(0x7fffffff); }
__device__ inline double not_a_number(double) { return not_a_number(0.f); }

__device__ inline int this_thread() { return static_cast<int>(threadIdx.x); }
__device__ inline int64_t this_block() { return blockIdx.x; }
__device__ inline int64_t all_blocks() { return gridDim.x; }

/// Blocks that a multiprocessor must hold at least; it bounds the registers, and the fewer bytes a
/// thread asks for at once, the more threads it takes.
template <typename T, int V>
constexpr int kBlocks = sizeof(T) == 8   ? 2
                        : V == 1         ? 4
                        : sizeof(T) == 4 ? 3
                                         : 2;
/// The same where a thread keeps coefficients of V columns besides.
template <typename T, int V>
constexpr int kTileBlocks = V == 1 && sizeof(T) != 8 ? 3 : 2;

/// a*b + c, rounded once.
__device__ inline float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double fused(double a, double b, double c) { return fma(a, b, c); }

// -- Vectors

template <typename T>
constexpr int kVectorLength = 16 / sizeof(T);

template <typename T, int V>
struct alignas(sizeof(T) * V) Vector {
  T values[V];
};

/// V consecutive elements from `at`; those without a bit in `valid` are not there.
struct Piece {
  int64_t at = 0;
  uint32_t valid = 0;
};
template <int V>
constexpr uint32_t kWhole = (1u << V) - 1;

/// The same where all are there or none.
struct WholePiece {
  int64_t at = 0;
  bool valid = false;
};

template <int V, typename T>
__device__ inline Vector<T, V> load(const T* from, const Piece& piece) {
  if (piece.valid == kWhole<V>) return *reinterpret_cast<const Vector<T, V>*>(from + piece.at);
  Vector<T, V> vector;
#pragma unroll
  for (int e = 0; e < V; ++e)
    vector.values[e] = piece.valid >> e & 1 ? from[piece.at + e] : narrow<T>(0);
  return vector;
}

template <int V, typename T>
__device__ inline void store(const Vector<T, V>& vector, T* to, const Piece& piece) {
  if (piece.valid == kWhole<V>) {
    *reinterpret_cast<Vector<T, V>*>(to + piece.at) = vector;
    return;
  }
#pragma unroll
  for (int e = 0; e < V; ++e)
    if (piece.valid >> e & 1) to[piece.at + e] = vector.values[e];
}

template <int V, typename T>
__device__ inline Vector<T, V> load(const T* from, const WholePiece& piece) {
  if (piece.valid) return *reinterpret_cast<const Vector<T, V>*>(from + piece.at);
  Vector<T, V> vector;
#pragma unroll
  for (int e = 0; e < V; ++e) vector.values[e] = narrow<T>(0);
  return vector;
}

template <int V, typename T>
__device__ inline void store(const Vector<T, V>& vector, T* to, const WholePiece& piece) {
  if (piece.valid) *reinterpret_cast<Vector<T, V>*>(to + piece.at) = vector;
}

/// K vectors, all on their way before the first is used. Null gives zeros.
template <int V, typename T, typename P, int K>
__device__ inline void load_together(const T* from, const P (&pieces)[K],
                                     Vector<T, V> (&vectors)[K]) {
#pragma unroll
  for (int k = 0; k < K; ++k) vectors[k] = load<V>(from, from == nullptr ? P() : pieces[k]);
}

// -- Values of a dtype known at run time

__device__ inline double value_at(const void* data, Dtype dtype, int64_t i) {
  switch (dtype) {
    case Dtype::float64:
      return static_cast<const double*>(data)[i];
    case Dtype::float16:
      return widen(static_cast<const __half*>(data)[i]);
    case Dtype::bfloat16:
      return widen(static_cast<const __nv_bfloat16*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}
__device__ inline double value_at(const MutableValues& values, int64_t i) {
  return value_at(values.data, values.dtype, i);
}
__device__ inline double value_or(const Values& values, int64_t i, double otherwise) {
  return values.data == nullptr ? otherwise : value_at(values.data, values.dtype, i);
}

/// Nothing where there is no such array.
__device__ inline void put(const MutableValues& values, int64_t i, double value) {
  if (values.data == nullptr) return;
  switch (values.dtype) {
    case Dtype::float64:
      static_cast<double*>(values.data)[i] = value;
      break;
    case Dtype::float16:
      static_cast<__half*>(values.data)[i] = narrow<__half>(static_cast<float>(value));
      break;
    case Dtype::bfloat16:
      static_cast<__nv_bfloat16*>(values.data)[i] =
          narrow<__nv_bfloat16>(static_cast<float>(value));
      break;
    default:
      static_cast<float*>(values.data)[i] = static_cast<float>(value);
  }
}

__device__ inline int64_t slot_of(const Layout& layout, int64_t cell) {
  return layout.slot_of_cell == nullptr ? cell : layout.slot_of_cell[cell];
}
__device__ inline double share_of(const Layout& layout, int64_t cell) {
  return layout.share == nullptr ? 1 : layout.share[cell];
}

template <typename Shared>
__device__ inline Shared& shared_memory() {
  static_assert(sizeof(Shared) <= 48 * 1024, "what every device gives without being asked");
  return *reinterpret_cast<Shared*>(cuda_shared_memory);
}

// -- Host side

constexpr int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

/// The smallest power of two that is at least n, between `least` and `most`.
inline int power_of_two(int64_t n, int least, int most) {
  int power = least;
  while (power < n && power < most) power *= 2;
  return power;
}

/// Kernels go on to the next item in strides of their grid, so a grid may be smaller than the work.
inline int64_t grid_for(int64_t items, const Resources& resources) {
  return std::min<int64_t>(items, int64_t{64} * std::max(resources.multiprocessors, 1));
}

template <typename... Parameters, typename... Arguments>
Status launch_kernel(void (*kernel)(Parameters...), int64_t blocks, size_t shared,
                     const Resources& resources, const Arguments&... arguments) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(resources.stream);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

/// Calls body(T()) for the element type.
template <typename Body>
Status dispatch(Dtype dtype, Body&& body) {
  switch (dtype) {
    case Dtype::float32:
      return body(float());
    case Dtype::float64:
      return body(double());
    case Dtype::float16:
      return body(__half());
    case Dtype::bfloat16:
      return body(__nv_bfloat16());
  }
  return cudaErrorInvalidValue;
}

/// Calls body(std::integral_constant<int, V>()), V the elements that are loaded at once.
template <typename T, typename Body>
Status with_vectors(bool aligned, Body&& body) {
  if (aligned) return body(std::integral_constant<int, kVectorLength<T>>());
  return body(std::integral_constant<int, 1>());
}

/// Whether sizes fit together, and outer*cells*inner elements can be addressed.
inline bool valid(const Layout& layout) {
  int64_t elements = 0;
  if (layout.outer < 0 || layout.cells < 0 || layout.inner < 0 || layout.slots < 0) return false;
  if (layout.affine_rows < 1 && layout.cells > 0) return false;
  if (layout.cells > 0 && layout.cells % layout.affine_rows != 0) return false;
  if (layout.by_column && layout.outer > 1) return false;
  if (__builtin_mul_overflow(layout.outer, layout.cells, &elements) ||
      __builtin_mul_overflow(elements, layout.inner, &elements) || elements > INT64_MAX / 16)
    return false;
  return layout.slot_of_cell != nullptr || layout.slots == layout.cells;
}

}  // namespace syncnorm::kernels::cuda
