#pragma once

#include <cstdint>

/// The inner loops, one contiguous run of memory each, compiled for several instruction sets and
/// chosen when the library is loaded. No torch header: they compile in a second. `float` and
/// `double` overloads of each.
namespace syncnorm::kernels::loops {

struct Sums {
  double first = 0;
  double second = 0;
};

/// xhat = (x - center)*scale + shift.
struct Affine {
  double center = 0;
  double scale = 1;
  double shift = 0;
};

template <typename T>
struct BackwardCoefficients {
  T center, scale, a, b, c;
};

#define SYNCNORM_DECLARE_LOOPS(T)                                                                 \
  /* sum(x - center), sum((x - center)^2) of one slot's run */                                    \
  Sums moments(const T* x, int64_t n, double center);                                             \
  /* sum(dy), sum(dy * (x - center)) of one slot's run */                                         \
  Sums backward_sums(const T* x, const T* dy, int64_t n, double center);                          \
  /* y = (x - center)*scale + shift */                                                            \
  void apply(const T* x, int64_t n, T center, T scale, T shift, T* y);                            \
  /* dx = a*dy + b*((x - center)*scale) + c */                                                    \
  void backward_apply(const T* x, const T* dy, int64_t n, const BackwardCoefficients<T>& k,       \
                      T* dx);                                                                     \
  /* The three with scale and shift by position; null pointers are left out (a bias only with a   \
   * weight). dweight += dy*xhat, dbias += dy, both or neither null. */                           \
  void apply_columns(const T* x, int64_t n, T center, T scale, T shift, const T* weight,          \
                     const T* bias, T* y);                                                        \
  Sums backward_sums_columns(const T* x, const T* dy, int64_t n, const Affine& affine,            \
                             const T* weight, double* dweight, double* dbias);                    \
  void backward_apply_columns(const T* x, const T* dy, int64_t n,                                 \
                              const BackwardCoefficients<T>& k, const T* weight, T* dx);          \
  /* The same with slots side by side in memory: adds rows x slots elements into first[slots],    \
   * second[slots] */                                                                             \
  void moments_rows(const T* x, int64_t rows, int64_t slots, const double* center, double* first, \
                    double* second);                                                              \
  void backward_sums_rows(const T* x, const T* dy, int64_t rows, int64_t slots,                   \
                          const double* center, double* first, double* second);                   \
  /* coefficients: (center, scale, shift) and (center, scale, a, b, c), [slots] each, one after   \
   * the other                                                                                    \
   */                                                                                             \
  void apply_rows(const T* x, int64_t rows, int64_t slots, const T* coefficients, T* y);          \
  void backward_apply_rows(const T* x, const T* dy, int64_t rows, int64_t slots,                  \
                           const T* coefficients, T* dx);

SYNCNORM_DECLARE_LOOPS(float)
SYNCNORM_DECLARE_LOOPS(double)
#undef SYNCNORM_DECLARE_LOOPS

}  // namespace syncnorm::kernels::loops
