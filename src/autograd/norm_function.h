#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autograd/moments.h"

namespace syncnorm {

/// What one norm fixes for its forward, its backward and the backward of that.
struct NormPart {
  /// Tells the norms of one call apart in messages and tags, "norm 1 (bn2)"; empty where there is
  /// one.
  std::string label;
  double eps = 0;
  NormLayout layout;
  bool relu = false;
  bool sums_first = false;  ///< a residual is added before, and the sum is a second output
  SlotCount count;

  /// From the exchange of statistics to the forward: the dense input, so that a strided one is not
  /// copied twice, and the sum that is normalised where a residual is added first.
  std::optional<NormInput> input;
  at::Tensor sum;
  std::shared_ptr<kernels::Arriving> arriving;
};

/// Norms that share their collectives: one, or a group of independent ones.
struct NormCall : torch::CustomClassHolder {
  std::shared_ptr<Communicator> comm;
  std::string module;
  std::vector<NormPart> parts;
  bool deferred = false;         ///< the host waits for none of the exchanges
  bool reduce_backward = false;  ///< some rank's input needs a gradient, so every rank takes part
  size_t inputs = 0;             ///< of the autograd node
};

/// Where a residual enters.
enum class ResidualPlace : uint8_t { none, before, after };

/// The tensors of one norm; absent ones are undefined, a bias comes with a weight only.
struct NormTensors {
  at::Tensor x;
  at::Tensor weight;  ///< as the layout says
  at::Tensor bias;
  at::Tensor residual;  ///< shape and dtype of x
  ResidualPlace place = ResidualPlace::none;
  at::Tensor running_mean;  ///< about which statistics are summed, see MomentsRequest
  bool keeps_variance = false;
  std::string details;
};

/// First half: the statistics of every norm over all ranks, in one collective. Fills `call`.
std::vector<Moments> exchange_statistics(const std::vector<NormTensors>& norms, NormCall& call);

/// Second half: y = activation(xhat * weight + bias + residual), and, where the residual comes
/// before, x + residual after each such y; differentiable through the statistics of all ranks.
///
/// Backward is one all-reduce for all norms, of two sums a slot, one where a norm is not centered,
/// none where no rank's input needs a gradient; under create_graph it is a composition of
/// differentiable operations, so that higher derivatives follow. The gradients of weight and bias
/// are this rank's sums.
std::vector<at::Tensor> apply_norms(const std::vector<NormTensors>& norms,
                                    const std::vector<Moments>& moments,
                                    const c10::intrusive_ptr<NormCall>& call);

/// Both halves for one norm: `call` brings comm, module and one part.
std::vector<at::Tensor> normalize(const NormTensors& norm,
                                  const c10::intrusive_ptr<NormCall>& call);

}  // namespace syncnorm
