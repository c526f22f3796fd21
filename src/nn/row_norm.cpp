#include "nn/row_norm.h"

#include "comm/signature.h"
#include "nn/norm_checks.h"

namespace syncnorm {

PreparedNorm prepare_row_norm(const torch::Tensor& input, const torch::Tensor& residual,
                              const RowNormArguments& arguments) {
  const auto& name = arguments.name;
  check_norm_input(input, name);
  TORCH_CHECK_VALUE(input.dim() > 0, name, ": expected an input [..., h], got a scalar");
  TORCH_CHECK_VALUE(arguments.hidden > 0 && input.size(-1) <= arguments.hidden, name, ": input ",
                    input.sizes(), " has more columns than hidden, ", arguments.hidden);
  check_norm_parameter(arguments.weight, "weight", {input.size(-1)}, input, name);
  check_norm_parameter(arguments.bias, "bias", {input.size(-1)}, input, name);
  TORCH_CHECK_VALUE(arguments.weight.defined() || !arguments.bias.defined(), name,
                    ": a bias needs a weight");
  check_eps(arguments.eps, name);

  TORCH_CHECK_VALUE(!residual.defined() || (residual.sizes() == input.sizes() &&
                                            residual.scalar_type() == input.scalar_type() &&
                                            residual.device() == input.device()),
                    name, ": input and residual must have one shape and dtype, on one device");

  PreparedNorm norm;
  norm.comm = arguments.comm;
  norm.name = name;
  norm.part.eps = arguments.eps;
  norm.part.layout = row_layout(input, arguments.hidden, arguments.centered);
  norm.tensors.x = input;
  norm.tensors.weight = with_unit_offset(arguments.weight, arguments.unit_offset);
  norm.tensors.bias = arguments.bias;
  norm.tensors.residual = residual;
  norm.tensors.place = residual.defined() ? ResidualPlace::before : ResidualPlace::none;
  norm.tensors.details = Signature()
                             .add("norm", arguments.centered ? "layer" : "rms")
                             .add("hidden", arguments.hidden)
                             .add("unit offset", arguments.unit_offset ? "yes" : "no")
                             .text();
  return norm;
}

}  // namespace syncnorm
