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

#define SYNCNORM_DECLARE_LOOPS(T)                                                                  \
  /* sum(x - center), sum((x - center)^2) of one slot's run */                                     \
  Sums moments(const T* x, int64_t n, double center);                                              \
  /* sum(dy), sum(dy * (x - center)) of one slot's run */                                          \
  Sums backward_sums(const T* x, const T* dy, int64_t n, double center);                           \
  /* y = (x - center)*scale + shift */                                                             \
  void apply(const T* x, int64_t n, T center, T scale, T shift, T* y);                             \
  /* dx = a*dy + b*(x - center) + c */                                                             \
  void backward_apply(const T* x, const T* dy, int64_t n, T center, T a, T b, T c, T* dx);         \
  /* The same with slots side by side in memory: adds rows x slots elements into first[slots],     \
   * second[slots] */                                                                              \
  void moments_rows(const T* x, int64_t rows, int64_t slots, const double* center, double* first,  \
                    double* second);                                                               \
  void backward_sums_rows(const T* x, const T* dy, int64_t rows, int64_t slots,                    \
                          const double* center, double* first, double* second);                    \
  /* coefficients: (center, scale, shift) and (center, a, b, c), [slots] each, one after the other \
   */                                                                                              \
  void apply_rows(const T* x, int64_t rows, int64_t slots, const T* coefficients, T* y);           \
  void backward_apply_rows(const T* x, const T* dy, int64_t rows, int64_t slots,                   \
                           const T* coefficients, T* dx);

SYNCNORM_DECLARE_LOOPS(float)
SYNCNORM_DECLARE_LOOPS(double)
#undef SYNCNORM_DECLARE_LOOPS

}  // namespace syncnorm::kernels::loops
