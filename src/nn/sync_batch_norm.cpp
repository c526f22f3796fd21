#include "syncnorm/sync_batch_norm.h"

#include "nn/batch_norm.h"
#include "syncnorm/named_module.h"

namespace syncnorm {
namespace {

int dims_of(const torch::Tensor& input) {
  return std::max<int>(1, static_cast<int>(input.dim()) - 2);
}

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(SyncBatchNormOptions options_)
    : options(std::move(options_)), default_name_(next_default_name("SyncBatchNorm")) {
  SyncBatchNormImpl::reset();
}

void SyncBatchNormImpl::reset() {
  TORCH_CHECK_VALUE(options.num_features() > 0,
                    "SyncBatchNorm: num_features must be positive, got ", options.num_features());
  const auto channels = options.num_features();
  weight = register_parameter(
      "weight", options.affine() ? torch::empty({channels}) : torch::Tensor(), options.affine());
  bias = register_parameter("bias", options.affine() ? torch::empty({channels}) : torch::Tensor(),
                            options.affine());
  const bool track = options.track_running_stats();
  running_mean =
      register_buffer("running_mean", track ? torch::zeros({channels}) : torch::Tensor());
  running_var = register_buffer("running_var", track ? torch::ones({channels}) : torch::Tensor());
  num_batches_tracked = register_buffer("num_batches_tracked",
                                        track ? torch::tensor(0, torch::kLong) : torch::Tensor());
  reset_parameters();
}

void SyncBatchNormImpl::reset_running_stats() {
  if (!running_mean.defined()) return;
  running_mean.zero_();
  running_var.fill_(1);
  num_batches_tracked.zero_();
}

void SyncBatchNormImpl::reset_parameters() {
  reset_running_stats();
  if (!weight.defined()) return;
  torch::nn::init::ones_(weight);
  torch::nn::init::zeros_(bias);
}

const std::string& SyncBatchNormImpl::display_name() const {
  return options.name().empty() ? default_name_ : options.name();
}

BatchNormArguments SyncBatchNormImpl::arguments_of(const torch::Tensor& input,
                                                   const torch::Tensor& residual) {
  BatchNormArguments arguments;
  arguments.weight = weight;
  arguments.bias = bias;
  arguments.residual = residual;
  arguments.relu = options.relu();
  arguments.running_mean = running_mean;
  arguments.running_var = running_var;
  arguments.eps = options.eps();
  arguments.momentum = options.momentum();
  arguments.comm = options.communicator();
  arguments.name = display_name();
  check_batch_norm_input(input, options.num_features(), arguments);
  batch_norm_dims = batch_norm_dims == 0 ? dims_of(input) : batch_norm_dims;
  arguments.update_running =
      is_training() && running_mean.defined() && !FreezeRunningStatsGuard::active();
  return arguments;
}

PreparedNorm SyncBatchNormImpl::prepare(const torch::Tensor& input, const torch::Tensor& residual) {
  const auto arguments = arguments_of(input, residual);
  if (is_training() || !running_mean.defined())
    return prepare_batch_norm(input, arguments, num_batches_tracked);
  PreparedNorm applied;
  applied.output = normalize_with_running(input, arguments);
  return applied;
}

torch::Tensor SyncBatchNormImpl::forward(const torch::Tensor& input,
                                         const torch::Tensor& residual) {
  auto norm = prepare(input, residual);
  return norm.output.defined() ? norm.output : run_norm(std::move(norm)).front();
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "SyncBatchNorm(" << options.num_features()
         << ", eps=" << options.eps() << ", momentum=";
  if (options.momentum()) {
    stream << *options.momentum();
  } else {
    stream << "cumulative average";
  }
  stream << ", affine=" << options.affine()
         << ", track_running_stats=" << options.track_running_stats();
  if (options.relu()) stream << ", relu=true";
  stream << ")";
}

}  // namespace syncnorm
