#pragma once

#include <torch/types.h>

#include <string>

namespace syncnorm {

/// Whether `dtype` is half or bfloat16: computed in float, parameters may be float.
inline bool is_half(torch::ScalarType dtype) {
  return dtype == torch::kHalf || dtype == torch::kBFloat16;
}

/// Raises c10::Error unless `input` is dense and of a dtype that norms take.
void check_norm_input(const torch::Tensor& input, const std::string& name);

/// Raises c10::Error unless `values`, where defined, have this shape, the input's device, and its
/// dtype or, for half types, float.
void check_norm_parameter(const torch::Tensor& values, const char* what, at::IntArrayRef shape,
                          const torch::Tensor& input, const std::string& name);

void check_eps(double eps, const std::string& name);

/// 1 + weight in float or wider, or `weight` itself where there is no offset.
torch::Tensor with_unit_offset(const torch::Tensor& weight, bool unit_offset);

}  // namespace syncnorm
