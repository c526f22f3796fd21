#pragma once

#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "autograd/norm_function.h"

namespace syncnorm {

/// A norm's call, checked and ready: what is left is to communicate and to apply.
struct PreparedNorm {
  NormTensors tensors;
  NormPart part;
  std::shared_ptr<Communicator> comm;
  std::string name;
  /// Of a norm that needs no communication: applied already, and all else here is empty.
  torch::Tensor output;
  /// Called with the statistics of all ranks, before they are applied; may be empty.
  std::function<void(const Moments&)> received;
};

/// Runs norms that share a communicator, with one collective for all, named `name`. Outputs as of
/// apply_norms.
std::vector<torch::Tensor> run_norms(std::vector<PreparedNorm> norms, const std::string& name);

/// One norm; the outputs likewise.
std::vector<torch::Tensor> run_norm(PreparedNorm norm);

}  // namespace syncnorm
