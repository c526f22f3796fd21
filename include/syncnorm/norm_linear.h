#pragma once

#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "syncnorm/linear.h"
#include "syncnorm/named_module.h"
#include "syncnorm/qk_norm.h"
#include "syncnorm/tensor_parallel_norm.h"

namespace syncnorm {

/// How the residual stream of a transformer lies on the ranks of a tensor-parallel group.
enum class Residual {
  replicated,  ///< whole on every rank (Shoeybi et al. 2019)
  sharded,     ///< each rank holds some columns of the hidden dimension
};

/// Options of NormColumnParallelLinear. All fixed at construction, but eps.
struct NormColumnParallelLinearOptions {
  NormColumnParallelLinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}

  /// Features of the whole input and output.
  TORCH_ARG(int64_t, in_features);
  TORCH_ARG(int64_t, out_features);
  /// nullopt: no norm, a plain column-parallel layer on the residual stream.
  TORCH_ARG(std::optional<NormKind>, norm) = NormKind::rms;
  /// Added to the variance or mean square; may be changed at any time, on all ranks. nullopt: 1e-5
  /// for layer, 1e-6 for rms.
  TORCH_ARG(std::optional<double>, eps) = std::nullopt;
  /// Learnable weight of the norm, and bias where it is a layer norm.
  TORCH_ARG(bool, elementwise_affine) = true;
  /// Scale by (1 + weight); rms only.
  TORCH_ARG(bool, unit_offset) = false;
  TORCH_ARG(Residual, residual) = Residual::sharded;
  /// Columns of the input on each rank where it is sharded; empty: balanced.
  TORCH_ARG(std::vector<int64_t>, in_shard_sizes);
  /// Keep the gathered rows for the backward, [rows, in_features] on each rank; otherwise gather
  /// them again there, one more all-gather.
  TORCH_ARG(bool, keep_gathered) = true;
  /// The linear part, as in ColumnParallelLinearOptions.
  TORCH_ARG(bool, bias) = true;
  TORCH_ARG(RangesByRank, rows);
  TORCH_ARG(uint64_t, seed) = 0;
  TORCH_ARG(std::optional<double>, init_std) = std::nullopt;
  TORCH_ARG(double, init_scale) = 1.0;
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  /// Name in error messages, the same on all ranks. Empty: "NormColumnParallelLinear-k".
  TORCH_ARG(std::string, name) = "";
};

/// y = norm(x) W^T + b, the rows of W split over ranks; the norm costs no collective of its own.
///
/// With a sharded residual stream, input [..., h] (this rank's columns), the rows have to be
/// gathered for W anyway: each rank's own moments ride along in the all-gather, and the sums that
/// the norm's gradient needs ride along in the reduce-scatter of the rows' gradient. So it costs
/// one all-gather forward and one reduce-scatter backward, what ColumnParallelLinear alone costs,
/// with a few more bytes: forward 8 a row for rms and 16 for layer, which also sends its weight and
/// bias (in float beside half types), and 8 in all by which ranks see that they agree; backward a
/// value a row for rms and two for layer, twice that in half types. It works at a single row.
/// Moments are taken about each rank's own mean and merged (Chan, Golub & LeVeque 1979), so no
/// digits are lost far from zero.
///
/// With a replicated one, input [..., in_features], every rank normalises the whole rows itself;
/// backward is one all-reduce, as ColumnParallelLinear's.
///
/// Output [..., rows of W on this rank]. Children: `norm`, a TensorParallelLayerNorm or
/// TensorParallelRMSNorm, and `linear`, a ColumnParallelLinear; the result equals
/// linear(norm(input)). The input's dtype is the linear weight's; norm parameters may stay float.
/// Under autocast both are cast to its dtype first, also a sharded input in front of the norm.
///
/// Raises CommunicationError on every rank where ranks disagree about a sharded input: rows, its
/// cut, dtype, eps, features, layer, or whether a backward will follow.
class NormColumnParallelLinearImpl : public torch::nn::Cloneable<NormColumnParallelLinearImpl>,
                                     public NamedModule {
 public:
  NormColumnParallelLinearImpl(int64_t in_features, int64_t out_features)
      : NormColumnParallelLinearImpl(NormColumnParallelLinearOptions(in_features, out_features)) {}
  explicit NormColumnParallelLinearImpl(NormColumnParallelLinearOptions options);

  torch::Tensor forward(const torch::Tensor& input);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  NormColumnParallelLinearOptions options;
  TensorParallelLayerNorm layer_norm{nullptr};  ///< one of these two is there, or none
  TensorParallelRMSNorm rms_norm{nullptr};
  ColumnParallelLinear linear{nullptr};
};
TORCH_MODULE(NormColumnParallelLinear);

}  // namespace syncnorm
