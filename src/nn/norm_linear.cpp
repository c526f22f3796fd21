#include "syncnorm/norm_linear.h"

#include <ATen/autocast_mode.h>

#include "autograd/norm_linear_function.h"
#include "nn/child.h"
#include "nn/norm_checks.h"
#include "syncnorm/environment.h"

namespace syncnorm {
namespace {

/// `values` as a linear layer under autocast takes them: in autocast's dtype, but double as it is.
torch::Tensor cast_for_linear(const torch::Tensor& values) {
  if (!values.defined() || !at::autocast::is_autocast_enabled(values.device().type()) ||
      !values.is_floating_point() || values.scalar_type() == torch::kDouble)
    return values;
  return values.to(at::autocast::get_autocast_dtype(values.device().type()));
}

}  // namespace

NormColumnParallelLinearImpl::NormColumnParallelLinearImpl(NormColumnParallelLinearOptions options_)
    : NamedModule("NormColumnParallelLinear", options_.name()), options(std::move(options_)) {
  options.communicator(communicator_or_world(options.communicator(), display_name()));
  TORCH_CHECK_VALUE(!options.unit_offset() || options.norm() == NormKind::rms, display_name(),
                    ": unit_offset is an option of rms norm, not of layer norm");
  NormColumnParallelLinearImpl::reset();
}

void NormColumnParallelLinearImpl::reset() {
  const bool sharded = options.residual() == Residual::sharded;
  const auto& comm = options.communicator();
  const auto norm_comm = sharded ? comm : self_communicator();
  const auto sizes = sharded ? options.in_shard_sizes() : std::vector<int64_t>();
  const bool layer = options.norm() == NormKind::layer;
  options.eps(options.eps().value_or(layer ? 1e-5 : 1e-6));
  layer_norm = nullptr;
  rms_norm = nullptr;
  if (layer) {
    layer_norm = register_module(
        "norm", TensorParallelLayerNorm(TensorParallelLayerNormOptions(options.in_features())
                                            .eps(*options.eps())
                                            .elementwise_affine(options.elementwise_affine())
                                            .shard_sizes(sizes)
                                            .communicator(norm_comm)
                                            .name(child_name(options.name(), "norm"))));
  } else if (options.norm()) {
    rms_norm = register_module(
        "norm", TensorParallelRMSNorm(TensorParallelRMSNormOptions(options.in_features())
                                          .eps(*options.eps())
                                          .elementwise_affine(options.elementwise_affine())
                                          .unit_offset(options.unit_offset())
                                          .shard_sizes(sizes)
                                          .communicator(norm_comm)
                                          .name(child_name(options.name(), "norm"))));
  }
  linear = register_module(
      "linear", ColumnParallelLinear(
                    ColumnParallelLinearOptions(options.in_features(), options.out_features())
                        .bias(options.bias())
                        .rows(options.rows())
                        .input_is_sharded(sharded)
                        .in_shard_sizes(sizes)
                        .seed(options.seed())
                        .init_std(options.init_std())
                        .init_scale(options.init_scale())
                        .communicator(comm)
                        .name(child_name(options.name(), "linear"))));
}

torch::Tensor NormColumnParallelLinearImpl::forward(const torch::Tensor& input) {
  const auto& name = display_name();
  if (!options.norm()) return linear->forward(input);
  const bool layer = options.norm() == NormKind::layer;
  if (options.residual() == Residual::replicated) {
    if (layer) layer_norm->options.eps(*options.eps());
    if (!layer) rms_norm->options.eps(*options.eps());
    return linear->forward(layer ? layer_norm->forward(input) : rms_norm->forward(input));
  }
  const auto& comm = options.communicator();
  const auto& sizes = linear->options.in_shard_sizes();
  const int64_t columns = sizes[comm->rank()];
  check_norm_input(input, name);
  TORCH_CHECK_VALUE(input.dim() > 0 && input.size(-1) == columns, name, ": rank ", comm->rank(),
                    " holds ", columns, " of ", options.in_features(),
                    " columns and expects an input [..., ", columns, "], got ", input.sizes());
  const auto x = cast_for_linear(input);
  const auto weight = cast_for_linear(linear->used_weight());
  const auto bias = cast_for_linear(linear->used_bias());
  TORCH_CHECK_TYPE(x.scalar_type() == weight.scalar_type(), name, ": the input is ",
                   x.scalar_type(), " but the linear weight ", weight.scalar_type(),
                   "; convert one of them");
  const auto& norm_weight = layer ? layer_norm->weight : rms_norm->weight;
  const auto norm_bias = layer ? layer_norm->bias : torch::Tensor();
  check_norm_parameter(norm_weight, "norm.weight", {columns}, x, name);
  check_norm_parameter(norm_bias, "norm.bias", {columns}, x, name);
  check_eps(*options.eps(), name);

  auto call = c10::make_intrusive<NormLinearCall>();
  call->comm = comm;
  call->module = name;
  call->eps = *options.eps();
  call->centered = layer;
  call->sizes = sizes;
  call->out_features = options.out_features();
  call->keep_gathered = options.keep_gathered();
  const c10::impl::ExcludeDispatchKeyGuard cast_already(c10::autocast_dispatch_keyset);
  const int64_t rows = c10::multiply_integers(input.sizes().slice(0, input.dim() - 1));
  const auto y =
      norm_linear(x.reshape({rows, columns}), with_unit_offset(norm_weight, options.unit_offset()),
                  norm_bias, weight, bias, call);
  auto shape = input.sizes().vec();
  shape.back() = y.size(1);
  return y.view(shape);
}

void NormColumnParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << "NormColumnParallelLinear(" << options.in_features() << ", " << options.out_features()
         << ", norm="
         << (!options.norm()                     ? "none"
             : options.norm() == NormKind::layer ? "layer"
                                                 : "rms")
         << ", residual=" << (options.residual() == Residual::sharded ? "sharded" : "replicated")
         << ")";
}

}  // namespace syncnorm
