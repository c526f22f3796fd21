// The source of every loop, in the namespace SYNCNORM_CAPABILITY. See loops.h.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <experimental/simd>
#include <limits>

#if defined(__SSE__)
#include <immintrin.h>
#endif

#include "kernels/cpu/loops.h"

#define INLINE __attribute__((always_inline)) inline
#define INLINED __attribute__((always_inline))   // for lambdas
#define OUTLINE __attribute__((noinline, cold))  // for what is rare

namespace syncnorm::kernels::loops::SYNCNORM_CAPABILITY {
namespace {

// Each builds on those before it.
// clang-format off
#include "kernels/cpu/simd.inl"
#include "kernels/cpu/moments.inl"
#include "kernels/cpu/forward.inl"
#include "kernels/cpu/backward.inl"
#include "kernels/cpu/coefficients.inl"
// clang-format on

template <typename T>
constexpr Loops<T> table() {
  return {moments<T>,
          squares<T>,
          moments_rows<T>,
          apply<T>,
          apply_rows<T>,
          apply_columns<T>,
          backward_sums<T>,
          backward_sums_rows<T>,
          backward_sums_columns<T>,
          backward_apply<T>,
          backward_apply_rows<T>,
          backward_apply_columns<T>,
          widen<compute_t<T>>,
          narrow<T>,
          coefficients<compute_t<T>>,
          backward_coefficients<compute_t<T>>,
          add<T>};
}

}  // namespace

// A constant: code that ran when the library is loaded would run on machines that lack the
// instructions.
extern const Tables tables;
constexpr Tables tables{table<float>(), table<double>(), table<bfloat16>(), table<half>()};

}  // namespace syncnorm::kernels::loops::SYNCNORM_CAPABILITY
