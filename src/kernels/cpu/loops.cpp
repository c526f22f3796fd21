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
      dx[s] = k[2 * slots + s] * dy[s] + k[3 * slots + s] * ((x[s] - k[s]) * k[slots + s]) +
              k[4 * slots + s];
}

template <typename T>
SYNCNORM_INLINE void apply_columns_of(const T* __restrict x, int64_t n, T center, T scale, T shift,
                                      const T* __restrict weight, const T* __restrict bias,
                                      T* __restrict y) {
  if (weight == nullptr) {
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - center) * scale + shift;
  } else if (bias == nullptr) {
    for (int64_t i = 0; i < n; ++i) y[i] = ((x[i] - center) * scale + shift) * weight[i];
  } else {
    for (int64_t i = 0; i < n; ++i) y[i] = ((x[i] - center) * scale + shift) * weight[i] + bias[i];
  }
}

/// `gradient(i)` is dy[i] times the weight, if there is one.
template <typename T, typename G>
SYNCNORM_INLINE Sums weighted_sums(const T* __restrict x, int64_t n, double center, G gradient) {
  double first[kLanes] = {};
  double second[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) {
      const double g = gradient(i + j);
      first[j] += g;
      second[j] += g * (static_cast<double>(x[i + j]) - center);
    }
  for (int j = 0; i < n; ++i, ++j) {
    const double g = gradient(i);
    first[j] += g;
    second[j] += g * (static_cast<double>(x[i]) - center);
  }
  return {total(first), total(second)};
}

template <typename T>
SYNCNORM_INLINE Sums backward_sums_columns_of(const T* __restrict x, const T* __restrict dy,
                                              int64_t n, const Affine& affine,
                                              const T* __restrict weight,
                                              double* __restrict dweight,
                                              double* __restrict dbias) {
  if (dweight != nullptr) {
    const double center = affine.center, scale = affine.scale, shift = affine.shift;
    for (int64_t i = 0; i < n; ++i) {
      const double g = dy[i];
      dweight[i] += g * ((static_cast<double>(x[i]) - center) * scale + shift);
      dbias[i] += g;
    }
  }
  if (weight == nullptr)
    return weighted_sums(x, n, affine.center,
                         [=](int64_t i) { return static_cast<double>(dy[i]); });
  return weighted_sums(x, n, affine.center, [=](int64_t i) {
    return static_cast<double>(dy[i]) * static_cast<double>(weight[i]);
  });
}

template <typename T>
SYNCNORM_INLINE void backward_apply_columns_of(const T* __restrict x, const T* __restrict dy,
                                               int64_t n, const BackwardCoefficients<T>& k,
                                               const T* __restrict weight, T* __restrict dx) {
  const T center = k.center, scale = k.scale, a = k.a, b = k.b, c = k.c;
  if (weight == nullptr) {
    for (int64_t i = 0; i < n; ++i) dx[i] = a * dy[i] + b * ((x[i] - center) * scale) + c;
  } else {
    for (int64_t i = 0; i < n; ++i)
      dx[i] = a * (dy[i] * weight[i]) + b * ((x[i] - center) * scale) + c;
  }
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
  SYNCNORM_CLONES void backward_apply(const T* x, const T* dy, int64_t n,                          \
                                      const BackwardCoefficients<T>& k, T* dx) {                   \
    backward_apply_columns_of<T>(x, dy, n, k, nullptr, dx);                                        \
  }                                                                                                \
  SYNCNORM_CLONES void apply_columns(const T* x, int64_t n, T center, T scale, T shift,            \
                                     const T* weight, const T* bias, T* y) {                       \
    apply_columns_of(x, n, center, scale, shift, weight, bias, y);                                 \
  }                                                                                                \
  SYNCNORM_CLONES Sums backward_sums_columns(const T* x, const T* dy, int64_t n,                   \
                                             const Affine& affine, const T* weight,                \
                                             double* dweight, double* dbias) {                     \
    return backward_sums_columns_of(x, dy, n, affine, weight, dweight, dbias);                     \
  }                                                                                                \
  SYNCNORM_CLONES void backward_apply_columns(const T* x, const T* dy, int64_t n,                  \
                                              const BackwardCoefficients<T>& k, const T* weight,   \
                                              T* dx) {                                             \
    backward_apply_columns_of(x, dy, n, k, weight, dx);                                            \
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
