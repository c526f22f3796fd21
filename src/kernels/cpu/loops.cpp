#include "kernels/cpu/loops.h"

// Function multiversioning picks the widest instruction set of the machine at load time; the number
// of partial sums is fixed, so every choice adds in the same order.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SYNCNORM_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SYNCNORM_CLONES
#endif
#define SYNCNORM_INLINE inline __attribute__((always_inline))

namespace syncnorm::kernels::loops {
namespace {

constexpr int kLanes = 16;

double total(const double* lanes) {
  double pairs[kLanes];
  for (int j = 0; j < kLanes; ++j) pairs[j] = lanes[j];
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) pairs[j] += pairs[j + width];
  return pairs[0];
}

template <typename T>
SYNCNORM_INLINE Sums moments_of(const T* x, int64_t n, double center) {
  double first[kLanes] = {};
  double second[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) {
      const double d = static_cast<double>(x[i + j]) - center;
      first[j] += d;
      second[j] += d * d;
    }
  for (int j = 0; i < n; ++i, ++j) {
    const double d = static_cast<double>(x[i]) - center;
    first[j] += d;
    second[j] += d * d;
  }
  return {total(first), total(second)};
}

template <typename T>
SYNCNORM_INLINE Sums backward_sums_of(const T* x, const T* dy, int64_t n, double center) {
  double first[kLanes] = {};
  double second[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) {
      const double g = dy[i + j];
      first[j] += g;
      second[j] += g * (static_cast<double>(x[i + j]) - center);
    }
  for (int j = 0; i < n; ++i, ++j) {
    const double g = dy[i];
    first[j] += g;
    second[j] += g * (static_cast<double>(x[i]) - center);
  }
  return {total(first), total(second)};
}

template <typename T>
SYNCNORM_INLINE void moments_rows_of(const T* __restrict x, int64_t rows, int64_t slots,
                                     const double* __restrict center, double* __restrict first,
                                     double* __restrict second) {
  for (int64_t r = 0; r < rows; ++r, x += slots)
    for (int64_t s = 0; s < slots; ++s) {
      const double d = static_cast<double>(x[s]) - center[s];
      first[s] += d;
      second[s] += d * d;
    }
}

template <typename T>
SYNCNORM_INLINE void backward_sums_rows_of(const T* __restrict x, const T* __restrict dy,
                                           int64_t rows, int64_t slots,
                                           const double* __restrict center,
                                           double* __restrict first, double* __restrict second) {
  for (int64_t r = 0; r < rows; ++r, x += slots, dy += slots)
    for (int64_t s = 0; s < slots; ++s) {
      const double g = dy[s];
      first[s] += g;
      second[s] += g * (static_cast<double>(x[s]) - center[s]);
    }
}

template <typename T>
SYNCNORM_INLINE void apply_rows_of(const T* __restrict x, int64_t rows, int64_t slots,
                                   const T* __restrict k, T* __restrict y) {
  for (int64_t r = 0; r < rows; ++r, x += slots, y += slots)
    for (int64_t s = 0; s < slots; ++s) y[s] = (x[s] - k[s]) * k[slots + s] + k[2 * slots + s];
}

template <typename T>
SYNCNORM_INLINE void backward_apply_rows_of(const T* __restrict x, const T* __restrict dy,
                                            int64_t rows, int64_t slots, const T* __restrict k,
                                            T* __restrict dx) {
  for (int64_t r = 0; r < rows; ++r, x += slots, dy += slots, dx += slots)
    for (int64_t s = 0; s < slots; ++s)
      dx[s] = k[slots + s] * dy[s] + k[2 * slots + s] * (x[s] - k[s]) + k[3 * slots + s];
}

}  // namespace

#define SYNCNORM_DEFINE_LOOPS(T)                                                                   \
  SYNCNORM_CLONES Sums moments(const T* x, int64_t n, double center) {                             \
    return moments_of(x, n, center);                                                               \
  }                                                                                                \
  SYNCNORM_CLONES Sums backward_sums(const T* x, const T* dy, int64_t n, double center) {          \
    return backward_sums_of(x, dy, n, center);                                                     \
  }                                                                                                \
  SYNCNORM_CLONES void apply(const T* x, int64_t n, T center, T scale, T shift, T* y) {            \
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - center) * scale + shift;                        \
  }                                                                                                \
  SYNCNORM_CLONES void backward_apply(const T* x, const T* dy, int64_t n, T center, T a, T b, T c, \
                                      T* dx) {                                                     \
    for (int64_t i = 0; i < n; ++i) dx[i] = a * dy[i] + b * (x[i] - center) + c;                   \
  }                                                                                                \
  SYNCNORM_CLONES void moments_rows(const T* x, int64_t rows, int64_t slots, const double* center, \
                                    double* first, double* second) {                               \
    moments_rows_of(x, rows, slots, center, first, second);                                        \
  }                                                                                                \
  SYNCNORM_CLONES void backward_sums_rows(const T* x, const T* dy, int64_t rows, int64_t slots,    \
                                          const double* center, double* first, double* second) {   \
    backward_sums_rows_of(x, dy, rows, slots, center, first, second);                              \
  }                                                                                                \
  SYNCNORM_CLONES void apply_rows(const T* x, int64_t rows, int64_t slots, const T* k, T* y) {     \
    apply_rows_of(x, rows, slots, k, y);                                                           \
  }                                                                                                \
  SYNCNORM_CLONES void backward_apply_rows(const T* x, const T* dy, int64_t rows, int64_t slots,   \
                                           const T* k, T* dx) {                                    \
    backward_apply_rows_of(x, dy, rows, slots, k, dx);                                             \
  }

SYNCNORM_DEFINE_LOOPS(float)
SYNCNORM_DEFINE_LOOPS(double)

}  // namespace syncnorm::kernels::loops
