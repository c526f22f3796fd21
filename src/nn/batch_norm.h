#pragma once

#include <torch/types.h>

#include <memory>
#include <optional>
#include <string>

#include "nn/prepared_norm.h"
#include "syncnorm/communicator.h"

namespace syncnorm {

/// Arguments shared by SyncBatchNorm and functional::sync_batch_norm.
struct BatchNormArguments {
  torch::Tensor weight;
  torch::Tensor bias;
  torch::Tensor running_mean;
  torch::Tensor running_var;
  torch::Tensor residual;
  bool relu = false;
  double eps = 0;
  std::optional<double> momentum;  ///< absent: the cumulative average
  bool update_running = false;
  std::shared_ptr<Communicator> comm;
  std::string name;
};

/// Raises c10::Error unless `input` is what batch norm over `channels` channels takes, with
/// parameters and buffers to match.
void check_batch_norm_input(const torch::Tensor& input, int64_t channels,
                            const BatchNormArguments& arguments);

/// Normalises with the statistics of all ranks' batches; one collective. `num_batches_tracked`, if
/// defined, counts the batch where there was one.
PreparedNorm prepare_batch_norm(const torch::Tensor& input, const BatchNormArguments& arguments,
                                const torch::Tensor& num_batches_tracked);

/// Normalises with the running statistics; no collective.
torch::Tensor normalize_with_running(const torch::Tensor& input,
                                     const BatchNormArguments& arguments);

}  // namespace syncnorm
