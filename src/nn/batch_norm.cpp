#include "nn/batch_norm.h"

#include <torch/torch.h>

#include "autograd/layout.h"
#include "autograd/moments.h"
#include "autograd/norm_function.h"
#include "nn/norm_checks.h"
#include "syncnorm/environment.h"
#include "syncnorm/sync_batch_norm.h"

namespace syncnorm {
namespace {

/// A center near the mean keeps digits; the running mean is near it on most steps and equal on all
/// ranks.
torch::Tensor choose_center(const BatchNormArguments& arguments, int64_t channels,
                            const torch::Tensor& like) {
  const auto options = like.options().dtype(torch::kDouble);
  if (!arguments.running_mean.defined()) return torch::zeros({channels}, options);
  return arguments.running_mean.detach().to(torch::kDouble).nan_to_num(0, 0, 0);
}

void update_running_statistics(const BatchNormArguments& arguments, const Moments& moments,
                               double count) {
  const torch::NoGradGuard no_grad;
  const auto blend = [&](const torch::Tensor& running, const torch::Tensor& latest) {
    running.copy_(running.to(torch::kDouble) * (1 - arguments.momentum) +
                  latest * arguments.momentum);
  };
  if (arguments.running_mean.defined()) blend(arguments.running_mean, moments.mean);
  if (arguments.running_var.defined())
    blend(arguments.running_var, moments.variance * (count / (count - 1)));
}

thread_local bool running_stats_frozen = false;

}  // namespace

FreezeRunningStatsGuard::FreezeRunningStatsGuard()
    : previous_(std::exchange(running_stats_frozen, true)) {}
FreezeRunningStatsGuard::~FreezeRunningStatsGuard() { running_stats_frozen = previous_; }
bool FreezeRunningStatsGuard::active() { return running_stats_frozen; }

void check_batch_norm_input(const torch::Tensor& input, int64_t channels,
                            const BatchNormArguments& arguments) {
  const auto& name = arguments.name;
  check_norm_input(input, name);
  TORCH_CHECK_VALUE(input.dim() >= 2 && input.dim() <= 5, name,
                    ": expected input [N, C], [N, C, L], [N, C, H, W] or [N, C, D, H, W], got ",
                    input.sizes());
  TORCH_CHECK_VALUE(input.size(1) == channels, name, ": expected ", channels,
                    " channels, got input ", input.sizes());
  check_norm_parameter(arguments.weight, "weight", {channels}, input, name);
  check_norm_parameter(arguments.bias, "bias", {channels}, input, name);
  check_norm_parameter(arguments.running_mean, "running_mean", {channels}, input, name);
  check_norm_parameter(arguments.running_var, "running_var", {channels}, input, name);
  check_eps(arguments.eps, name);
  TORCH_CHECK_VALUE(arguments.momentum >= 0 && arguments.momentum <= 1, name,
                    ": momentum must be in [0, 1], got ", arguments.momentum);
}

std::pair<torch::Tensor, double> normalize_with_batch(const torch::Tensor& input,
                                                      const BatchNormArguments& arguments) {
  auto call = c10::make_intrusive<NormCall>();
  call->comm = communicator_or_world(arguments.comm, arguments.name);
  call->module = arguments.name;
  call->eps = arguments.eps;
  const ModuleScope scope(arguments.name);

  MomentsRequest request;
  request.comm = call->comm;
  request.dtype = input.scalar_type();
  request.eps = arguments.eps;
  request.grad_mode = torch::GradMode::is_enabled();
  request.wants_gradient = request.grad_mode && input.requires_grad();
  request.keeps_variance = arguments.update_running;
  call->layout = channel_layout(input);
  Moments moments;
  {
    const torch::NoGradGuard no_grad;
    moments = exchange_moments(NormInput(input, call->layout), call->layout,
                               choose_center(arguments, input.size(1), input), request);
  }
  const auto count = moments.count.item<double>();
  TORCH_CHECK_VALUE(
      count != 1, arguments.name,
      ": expected more than 1 value per channel over all ranks when training, got input ",
      input.sizes(), " on rank ", call->comm->rank());
  if (count > 0 && arguments.update_running) update_running_statistics(arguments, moments, count);
  call->count = moments.count;
  call->reduce_backward = moments.ranks_wanting_gradient > 0;
  return {apply_norm(input, arguments.weight, arguments.bias, moments, call), count};
}

torch::Tensor normalize_with_running(const torch::Tensor& input,
                                     const BatchNormArguments& arguments) {
  return torch::batch_norm(
      input, arguments.weight, arguments.bias, arguments.running_mean, arguments.running_var,
      /*training=*/false, /*momentum=*/0, arguments.eps, /*cudnn_enabled=*/false);
}

torch::Tensor functional::sync_batch_norm(const torch::Tensor& input,
                                          const torch::Tensor& running_mean,
                                          const torch::Tensor& running_var,
                                          const SyncBatchNormFuncOptions& options) {
  TORCH_CHECK_VALUE(running_mean.defined() == running_var.defined(), options.name(),
                    ": give both running_mean and running_var, or neither");
  BatchNormArguments arguments;
  arguments.weight = options.weight();
  arguments.bias = options.bias();
  arguments.running_mean = running_mean;
  arguments.running_var = running_var;
  arguments.eps = options.eps();
  arguments.momentum = options.momentum();
  arguments.update_running = options.training();
  arguments.comm = options.communicator();
  arguments.name = options.name();
  check_batch_norm_input(input, input.defined() && input.dim() > 1 ? input.size(1) : 0, arguments);
  if (!options.training() && running_mean.defined())
    return normalize_with_running(input, arguments);
  return normalize_with_batch(input, arguments).first;
}

}  // namespace syncnorm
