#include "syncnorm/tensor_parallel_norm.h"

#include <cmath>

#include "nn/row_norm.h"
#include "syncnorm/environment.h"

namespace syncnorm {
namespace {

/// This rank's shard of rows of `options.hidden()`.
template <typename Options>
Sharding shard_of(const Options& options, const std::string& name) {
  TORCH_CHECK_VALUE(options.hidden() > 0, name, ": hidden must be positive, got ",
                    options.hidden());
  auto comm = communicator_or_world(options.communicator(), name);
  auto sizes = options.shard_sizes().empty() ? balanced_shards(options.hidden(), comm->size())
                                             : options.shard_sizes();
  auto shard = Sharding::consecutive(std::move(comm), 0, sizes);
  TORCH_CHECK_VALUE(shard.extent == options.hidden(), name, ": shard_sizes ", sizes, " add up to ",
                    shard.extent, ", hidden is ", options.hidden());
  return shard;
}

torch::Tensor parameter_of(const Sharding& shard, bool wanted) {
  return wanted ? torch::empty({shard.local_size(shard.comm->rank())}) : torch::Tensor();
}

template <typename Module>
RowNormArguments arguments_of(const Module& module, const torch::Tensor& input) {
  RowNormArguments arguments;
  arguments.hidden = module.options.hidden();
  arguments.weight = module.weight;
  arguments.bias = module.bias;
  arguments.eps = module.options.eps();
  arguments.comm = module.shard().comm;
  arguments.name = module.display_name();
  const auto columns = module.shard().local_size(arguments.comm->rank());
  TORCH_CHECK_VALUE(input.defined() && input.dim() > 0 && input.size(-1) == columns, arguments.name,
                    ": rank ", arguments.comm->rank(), " holds ", columns, " of ", arguments.hidden,
                    " columns and expects an input [..., ", columns, "], got ",
                    input.defined() ? c10::str(input.sizes()) : "an undefined tensor");
  return arguments;
}

NormAndResidual both(const std::vector<torch::Tensor>& outputs) { return {outputs[0], outputs[1]}; }

torch::Tensor checked_residual(const torch::Tensor& residual, const std::string& name) {
  TORCH_CHECK_VALUE(residual.defined(), name, ": the residual is undefined");
  return residual;
}

}  // namespace

Sharding TensorParallelNorm::sharding_of(const std::string& /*name*/) const {
  // Over itself alone a rank holds whole rows, as the other ranks of a larger group may too.
  return shard_.comm->size() == 1 ? Sharding() : shard_;
}

TensorParallelLayerNormImpl::TensorParallelLayerNormImpl(TensorParallelLayerNormOptions options_)
    : TensorParallelNorm("TensorParallelLayerNorm", options_.name()), options(std::move(options_)) {
  TensorParallelLayerNormImpl::reset();
}

void TensorParallelLayerNormImpl::reset() {
  shard_ = shard_of(options, display_name());
  const bool affine = options.elementwise_affine();
  weight = register_parameter("weight", parameter_of(shard_, affine), affine);
  const bool biased = affine && options.bias();
  bias = register_parameter("bias", parameter_of(shard_, biased), biased);
  reset_parameters();
}

void TensorParallelLayerNormImpl::reset_parameters() {
  if (weight.defined()) torch::nn::init::ones_(weight);
  if (bias.defined()) torch::nn::init::zeros_(bias);
}

PreparedNorm TensorParallelLayerNormImpl::prepare(const torch::Tensor& input,
                                                  const torch::Tensor& residual) {
  return prepare_row_norm(input, residual, arguments_of(*this, input));
}

torch::Tensor TensorParallelLayerNormImpl::forward(const torch::Tensor& input) {
  return run_norm(prepare(input, {})).front();
}

NormAndResidual TensorParallelLayerNormImpl::forward_residual(const torch::Tensor& input,
                                                              const torch::Tensor& residual) {
  return both(run_norm(prepare(input, checked_residual(residual, display_name()))));
}

void TensorParallelLayerNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "TensorParallelLayerNorm(" << options.hidden() << " over "
         << shard_.comm->size() << ", eps=" << options.eps()
         << ", elementwise_affine=" << weight.defined() << ", bias=" << bias.defined() << ")";
}

TensorParallelRMSNormImpl::TensorParallelRMSNormImpl(TensorParallelRMSNormOptions options_)
    : TensorParallelNorm("TensorParallelRMSNorm", options_.name()), options(std::move(options_)) {
  TensorParallelRMSNormImpl::reset();
}

void TensorParallelRMSNormImpl::reset() {
  shard_ = shard_of(options, display_name());
  const bool affine = options.elementwise_affine();
  weight = register_parameter("weight", parameter_of(shard_, affine), affine);
  const bool biased = affine && options.bias();
  bias = register_parameter("bias", parameter_of(shard_, biased), biased);
  reset_parameters();
}

void TensorParallelRMSNormImpl::reset_parameters() {
  if (weight.defined()) torch::nn::init::constant_(weight, options.unit_offset() ? 0 : 1);
  if (bias.defined()) torch::nn::init::zeros_(bias);
}

PreparedNorm TensorParallelRMSNormImpl::prepare(const torch::Tensor& input,
                                                const torch::Tensor& residual) {
  auto arguments = arguments_of(*this, input);
  arguments.centered = false;
  arguments.unit_offset = options.unit_offset();
  return prepare_row_norm(input, residual, arguments);
}

torch::Tensor TensorParallelRMSNormImpl::forward(const torch::Tensor& input) {
  return run_norm(prepare(input, {})).front();
}

NormAndResidual TensorParallelRMSNormImpl::forward_residual(const torch::Tensor& input,
                                                            const torch::Tensor& residual) {
  return both(run_norm(prepare(input, checked_residual(residual, display_name()))));
}

void TensorParallelRMSNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "TensorParallelRMSNorm(" << options.hidden() << " over "
         << shard_.comm->size() << ", eps=" << options.eps()
         << ", elementwise_affine=" << weight.defined() << ", bias=" << bias.defined()
         << ", unit_offset=" << options.unit_offset() << ")";
}

torch::Tensor functional::tensor_parallel_layer_norm(
    const torch::Tensor& input, const TensorParallelLayerNormFuncOptions& options) {
  RowNormArguments arguments;
  arguments.hidden = options.hidden();
  arguments.weight = options.weight();
  arguments.bias = options.bias();
  arguments.eps = options.eps();
  arguments.comm = communicator_or_world(options.communicator(), options.name());
  arguments.name = options.name();
  return run_norm(prepare_row_norm(input, {}, arguments)).front();
}

torch::Tensor functional::tensor_parallel_rms_norm(
    const torch::Tensor& input, const TensorParallelRMSNormFuncOptions& options) {
  RowNormArguments arguments;
  arguments.hidden = options.hidden();
  arguments.weight = options.weight();
  arguments.bias = options.bias();
  arguments.eps = options.eps();
  arguments.centered = false;
  arguments.unit_offset = options.unit_offset();
  arguments.comm = communicator_or_world(options.communicator(), options.name());
  arguments.name = options.name();
  return run_norm(prepare_row_norm(input, {}, arguments)).front();
}

}  // namespace syncnorm
