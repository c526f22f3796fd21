#include "nn/row_norm.h"

#include "autograd/norm_function.h"
#include "comm/signature.h"
#include "nn/norm_checks.h"

namespace syncnorm {

torch::Tensor row_norm(const torch::Tensor& input, const RowNormArguments& arguments) {
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

  auto call = c10::make_intrusive<NormCall>();
  call->comm = arguments.comm;
  call->module = name;
  call->eps = arguments.eps;
  call->layout = row_layout(input, arguments.hidden, arguments.centered);
  const ModuleScope scope(name);
  const auto details = Signature()
                           .add("norm", arguments.centered ? "layer" : "rms")
                           .add("hidden", arguments.hidden)
                           .add("unit offset", arguments.unit_offset ? "yes" : "no")
                           .text();
  return normalize(input, with_unit_offset(arguments.weight, arguments.unit_offset), arguments.bias,
                   call, details);
}

}  // namespace syncnorm
