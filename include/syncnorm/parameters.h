#pragma once

#include <torch/torch.h>

#include <memory>
#include <vector>

#include "syncnorm/communicator.h"
#include "syncnorm/sharding.h"

namespace syncnorm {

/// torch::nn::utils::clip_grad_norm_ for parameters of which some are split over ranks: scales all
/// gradients by min(1, max_norm / (norm + 1e-6)) and returns the norm before, the same on all
/// ranks.
///
/// The norm is that of the whole model's gradient: each element counts once, those of shards on the
/// ranks that hold them, those that several ranks hold (overlapping ranges, replicated parameters)
/// once, and so does a parameter registered twice. `comm` is the group over which shards lie (null:
/// the living Environment's world); with data parallelism average gradients first. `norm_type` is
/// the p of the p-norm, positive, also infinity. Accumulates in double. One all-reduce of one word.
///
/// Raises c10::Error before communicating where a parameter is cut for another group or a gradient
/// is sparse; with `error_if_nonfinite`, on every rank and having changed nothing, where the norm
/// is infinite or NaN (otherwise gradients then become zero or NaN, as in PyTorch).
double clip_grad_norm(const torch::nn::Module& module, double max_norm,
                      const std::shared_ptr<Communicator>& comm, double norm_type = 2,
                      bool error_if_nonfinite = false);

/// The same over a list, of sharded_tensors or made by hand.
double clip_grad_norm(const std::vector<ShardedTensor>& parameters, double max_norm,
                      const std::shared_ptr<Communicator>& comm, double norm_type = 2,
                      bool error_if_nonfinite = false);

}  // namespace syncnorm
