#include "nn/batch_norm.h"

#include <torch/torch.h>

#include "autograd/norm_function.h"
#include "nn/norm_checks.h"
#include "syncnorm/environment.h"
#include "syncnorm/sync_batch_norm.h"

namespace syncnorm {
namespace {

thread_local bool running_stats_frozen = false;

int64_t batches_of(const torch::Tensor& num_batches_tracked) {
  return num_batches_tracked.defined() ? num_batches_tracked.item<int64_t>() : 0;
}

double momentum_of(const BatchNormArguments& arguments, const torch::Tensor& num_batches_tracked) {
  if (arguments.momentum.has_value()) return *arguments.momentum;
  return 1.0 / static_cast<double>(batches_of(num_batches_tracked) + 1);
}

/// add_(1), without its dispatch and iterator for the counter of most modules.
void count_batch(const torch::Tensor& num_batches_tracked) {
  if (!num_batches_tracked.defined()) return;
  if (!num_batches_tracked.is_cpu() || num_batches_tracked.scalar_type() != torch::kLong ||
      num_batches_tracked.numel() != 1 || num_batches_tracked.is_inference()) {
    num_batches_tracked.add_(1);
    return;
  }
  ++*num_batches_tracked.data_ptr<int64_t>();
  num_batches_tracked.unsafeGetTensorImpl()->bump_version();
}

/// Running statistics change on the device, when the batch's arrive.
void update_on_arrival(const BatchNormArguments& arguments,
                       const torch::Tensor& num_batches_tracked, kernels::Arriving& arriving) {
  arriving.outcome.refuses_single_value = true;
  if (!arguments.update_running) return;
  arriving.running_mean = arguments.running_mean;
  arriving.running_var = arguments.running_var;
  // A module that was cast as a whole counts in another dtype, which the kernels do not write.
  const bool counts = num_batches_tracked.defined() &&
                      num_batches_tracked.scalar_type() == torch::kLong &&
                      num_batches_tracked.device() == arguments.running_mean.device();
  if (counts) arriving.batches = num_batches_tracked;
  arriving.momentum =
      counts ? arguments.momentum.value_or(-1) : momentum_of(arguments, num_batches_tracked);
  if (!counts) count_batch(num_batches_tracked);
}

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
  if (arguments.residual.defined())
    TORCH_CHECK_VALUE(arguments.residual.sizes() == input.sizes() &&
                          arguments.residual.scalar_type() == input.scalar_type() &&
                          arguments.residual.device() == input.device(),
                      name, ": the residual must have the input's shape, dtype and device, ",
                      input.sizes(), " ", input.scalar_type(), ", got ", arguments.residual.sizes(),
                      " ", arguments.residual.scalar_type());
  const double momentum = arguments.momentum.value_or(0);
  TORCH_CHECK_VALUE(momentum >= 0 && momentum <= 1, name, ": momentum must be in [0, 1], got ",
                    momentum);
}

PreparedNorm prepare_batch_norm(const torch::Tensor& input, const BatchNormArguments& arguments,
                                const torch::Tensor& num_batches_tracked) {
  PreparedNorm norm;
  norm.comm = communicator_or_world(arguments.comm, arguments.name);
  norm.name = arguments.name;
  norm.part.eps = arguments.eps;
  norm.part.layout = channel_layout(input);
  norm.part.relu = arguments.relu;
  norm.tensors.x = input;
  norm.tensors.weight = arguments.weight;
  norm.tensors.bias = arguments.bias;
  norm.tensors.residual = arguments.residual;
  norm.tensors.place = arguments.residual.defined() ? ResidualPlace::after : ResidualPlace::none;
  // A center near the mean keeps digits; the running mean is near it on most steps and equal on all
  // ranks.
  norm.tensors.running_mean = arguments.running_mean;
  norm.tensors.keeps_variance = arguments.update_running;
  TORCH_CHECK_VALUE(
      !arguments.update_running || kernels::kernels_for(input.device()).deferred() == nullptr ||
          (arguments.running_mean.is_contiguous() && arguments.running_var.is_contiguous()),
      arguments.name, ": running_mean and running_var must be contiguous on a GPU");
  norm.received = [arguments, num_batches_tracked, shape = input.sizes().vec(),
                   rank = norm.comm->rank()](const Moments& moments) {
    if (moments.arriving != nullptr)
      return update_on_arrival(arguments, num_batches_tracked, *moments.arriving);
    const double count = moments.count.all;
    TORCH_CHECK_VALUE(
        count != 1, arguments.name,
        ": expected more than 1 value per channel over all ranks when training, got input ",
        at::IntArrayRef(shape), " on rank ", rank);
    if (count == 0 || !arguments.update_running) return;
    const torch::NoGradGuard no_grad;
    kernels::kernels_for(moments.statistics.device())
        .update_running(moments.statistics, count, momentum_of(arguments, num_batches_tracked),
                        arguments.running_mean, arguments.running_var);
    count_batch(num_batches_tracked);
  };
  return norm;
}

torch::Tensor normalize_with_running(const torch::Tensor& input,
                                     const BatchNormArguments& arguments) {
  auto y = torch::batch_norm(
      input, arguments.weight, arguments.bias, arguments.running_mean, arguments.running_var,
      /*training=*/false, /*momentum=*/0, arguments.eps, /*cudnn_enabled=*/false);
  if (arguments.residual.defined()) y = y + arguments.residual;
  return arguments.relu ? y.relu() : y;
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
  arguments.residual = options.residual();
  arguments.relu = options.relu();
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
  return run_norm(prepare_batch_norm(input, arguments, {})).front();
}

}  // namespace syncnorm
