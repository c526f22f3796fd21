#pragma once

#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>

#include "syncnorm/communicator.h"
#include "syncnorm/norm_group.h"

namespace syncnorm {

struct BatchNormArguments;

/// Options of SyncBatchNorm. Those of torch::nn::BatchNorm2d, and over whom the statistics are
/// taken.
struct SyncBatchNormOptions {
  /* implicit */ SyncBatchNormOptions(int64_t num_features) : num_features_(num_features) {}

  /// Channels C of the input. Fixed at construction.
  TORCH_ARG(int64_t, num_features);
  /// Added to the variance. May be changed at any time, on all ranks.
  TORCH_ARG(double, eps) = 1e-5;
  /// Weight of the new statistics in the running ones; nullopt is the cumulative average. May be
  /// changed at any time.
  TORCH_ARG(std::optional<double>, momentum) = 0.1;
  /// Learnable weight and bias. Fixed at construction.
  TORCH_ARG(bool, affine) = true;
  /// Keep running statistics and use them in evaluation. Fixed at construction.
  TORCH_ARG(bool, track_running_stats) = true;
  /// Apply max(., 0) to the output, in the same pass. May be changed at any time.
  TORCH_ARG(bool, relu) = false;
  /// The ranks that share statistics; null is the living Environment's world, looked up at the
  /// first forward.
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  /// Name in error messages, the same on all ranks. Empty: "SyncBatchNorm-k" for the k-th made in
  /// this process; convert_sync_batchnorm, DistributedDataParallel and name_modules set the path in
  /// the model.
  TORCH_ARG(std::string, name) = "";
};

/// Batch normalization over the batch of all ranks together: BatchNorm1d, 2d and 3d in one.
///
/// Input [N, C], [N, C, L], [N, C, H, W] or [N, C, D, H, W], N may differ between ranks and be
/// zero; float, double, half or bfloat16; any memory format, which the output keeps. Training costs
/// one collective forward and one backward; evaluation with running statistics none. Statistics are
/// those of the gathered batch (Ioffe & Szegedy 2015): biased variance to normalise, unbiased for
/// running_var. Buffers are bit-identical on all ranks after every step. weight.grad and bias.grad
/// are local sums, for data parallelism to average.
///
/// Raises c10::Error for a wrong shape or dtype before communicating; for a single value per
/// channel in the whole batch, on every rank; CommunicationError where ranks disagree (channels,
/// dtype, eps, order of layers, mode).
///
/// Parameters and buffers have torch::nn::BatchNorm's names and shapes: weight, bias, running_mean,
/// running_var [C], num_batches_tracked [].
class SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl>, public GroupableNorm {
 public:
  explicit SyncBatchNormImpl(int64_t num_features)
      : SyncBatchNormImpl(SyncBatchNormOptions(num_features)) {}
  explicit SyncBatchNormImpl(SyncBatchNormOptions options);

  /// Norm, then `+ residual` (of the input's shape and dtype) if one is given, then the ReLU if
  /// options.relu(): one pass over memory instead of three, and backward likewise.
  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& residual = {});

  void reset() override;
  void reset_parameters();
  void reset_running_stats();
  void pretty_print(std::ostream& stream) const override;

  SyncBatchNormOptions options;
  torch::Tensor weight;
  torch::Tensor bias;
  torch::Tensor running_mean;
  torch::Tensor running_var;
  torch::Tensor num_batches_tracked;

  /// options.name(), or the default name where that is empty.
  const std::string& display_name() const;

  /// Spatial kind to revert to: 1, 2 or 3 as BatchNorm{1,2,3}d, 0 where not converted and no input
  /// was seen.
  int batch_norm_dims = 0;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(torch::Tensor())})

 private:
  BatchNormArguments arguments_of(const torch::Tensor& input, const torch::Tensor& residual);
  PreparedNorm prepare(const torch::Tensor& input, const torch::Tensor& residual) override;

  std::string default_name_;
};
TORCH_MODULE(SyncBatchNorm);

/// While it lives, SyncBatchNorm on this thread leaves its running statistics alone: put it round
/// the second forward of a checkpointed (recomputed) block, so that each batch counts once.
class FreezeRunningStatsGuard {
 public:
  FreezeRunningStatsGuard();
  ~FreezeRunningStatsGuard();
  FreezeRunningStatsGuard(const FreezeRunningStatsGuard&) = delete;
  FreezeRunningStatsGuard& operator=(const FreezeRunningStatsGuard&) = delete;
  static bool active();

 private:
  bool previous_;
};

namespace functional {

/// Options of functional::sync_batch_norm; names as in torch::nn::functional::BatchNormFuncOptions.
struct SyncBatchNormFuncOptions {
  TORCH_ARG(torch::Tensor, weight) = torch::Tensor();
  TORCH_ARG(torch::Tensor, bias) = torch::Tensor();
  /// Added after the norm, before the ReLU; of the input's shape and dtype.
  TORCH_ARG(torch::Tensor, residual) = torch::Tensor();
  TORCH_ARG(bool, relu) = false;
  /// Normalise with the batch's statistics and update the running ones; otherwise normalise with
  /// the running ones.
  TORCH_ARG(bool, training) = false;
  TORCH_ARG(double, momentum) = 0.1;
  TORCH_ARG(double, eps) = 1e-5;
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  TORCH_ARG(std::string, name) = "sync_batch_norm";
};

/// Functional form of SyncBatchNorm; running_mean and running_var [C] may be undefined (then batch
/// statistics serve evaluation too) and are updated in place in training.
torch::Tensor sync_batch_norm(const torch::Tensor& input, const torch::Tensor& running_mean,
                              const torch::Tensor& running_var,
                              const SyncBatchNormFuncOptions& options);

}  // namespace functional
}  // namespace syncnorm
