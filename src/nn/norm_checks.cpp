#include "nn/norm_checks.h"

#include <torch/torch.h>

#include <cmath>

namespace syncnorm {

void check_norm_input(const torch::Tensor& input, const std::string& name) {
  TORCH_CHECK_VALUE(input.defined(), name, ": the input is undefined");
  TORCH_CHECK(input.layout() == torch::kStrided, name, ": expected a dense input, got layout ",
              input.layout());
  const auto dtype = input.scalar_type();
  TORCH_CHECK_TYPE(dtype == torch::kDouble || dtype == torch::kFloat || is_half(dtype), name,
                   ": input must be double, float, half or bfloat16, got ", dtype);
}

void check_norm_parameter(const torch::Tensor& values, const char* what, at::IntArrayRef shape,
                          const torch::Tensor& input, const std::string& name) {
  if (!values.defined()) return;
  TORCH_CHECK_VALUE(values.sizes() == shape, name, ": ", what, " must have shape ", shape, ", got ",
                    values.sizes());
  TORCH_CHECK(values.device() == input.device(), name, ": input is on ", input.device(), " but ",
              what, " on ", values.device());
  const auto dtype = input.scalar_type();
  TORCH_CHECK_TYPE(
      values.scalar_type() == dtype || (is_half(dtype) && values.scalar_type() == torch::kFloat),
      name, ": input is ", dtype, " but ", what, " is ", values.scalar_type(),
      "; they must match, or be float for half and bfloat16");
}

void check_eps(double eps, const std::string& name) {
  TORCH_CHECK_VALUE(eps >= 0 && std::isfinite(eps), name,
                    ": eps must be finite and not negative, got ", eps);
}

torch::Tensor with_unit_offset(const torch::Tensor& weight, bool unit_offset) {
  if (!unit_offset || !weight.defined()) return weight;
  return (is_half(weight.scalar_type()) ? weight.to(torch::kFloat) : weight) + 1;
}

}  // namespace syncnorm
