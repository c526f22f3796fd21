#pragma once

#include <torch/torch.h>

namespace syncnorm::testing {

/// Tolerance relative to the largest value for one pass of a norm in `dtype` against double. Float:
/// coefficients rounded once and some ten roundings of 2^-24, and a difference of like terms in dx,
/// which may double them. Half and bfloat16: the output is rounded once, by 2^-11 and 2^-8 at most,
/// beside what float does. `in_double` is what sums of the test's sizes differ by in another order.
inline double norm_tolerance(torch::ScalarType dtype, double in_double) {
  switch (dtype) {
    case torch::kDouble:
      return in_double;
    case torch::kFloat:
      return 24 * 0x1p-24;
    case torch::kHalf:
      return 1.5 * 0x1p-11;
    default:
      return 1.5 * 0x1p-8;
  }
}

}  // namespace syncnorm::testing
