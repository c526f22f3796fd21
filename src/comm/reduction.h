#pragma once

#include <ATen/ATen.h>

namespace syncnorm {

/// Dtype in which a reduction of `dtype` is computed: float for half and bfloat16, otherwise
/// `dtype`.
inline at::ScalarType reduction_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

/// Raises c10::Error for dtypes that the backends cannot add: bool, complex and the exotic ones.
inline void check_reducible(at::ScalarType dtype, const char* operation) {
  switch (dtype) {
    case at::kDouble:
    case at::kFloat:
    case at::kHalf:
    case at::kBFloat16:
    case at::kLong:
    case at::kInt:
    case at::kShort:
    case at::kChar:
    case at::kByte:
      return;
    default:
      TORCH_CHECK(false, operation, ": cannot reduce dtype ", dtype,
                  "; use double, float, half, bfloat16 or an integer of 8 to 64 bits");
  }
}

}  // namespace syncnorm
