#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "syncnorm/communicator.h"
#include "syncnorm/named_module.h"
#include "syncnorm/norm_group.h"
#include "syncnorm/sharding.h"

namespace syncnorm {

/// Options of TensorParallelLayerNorm.
struct TensorParallelLayerNormOptions {
  /* implicit */ TensorParallelLayerNormOptions(int64_t hidden) : hidden_(hidden) {}

  /// Length of a whole row, over all ranks. Fixed at construction.
  TORCH_ARG(int64_t, hidden);
  /// Added to the variance. May be changed at any time, on all ranks.
  TORCH_ARG(double, eps) = 1e-5;
  /// Learnable weight. Fixed at construction.
  TORCH_ARG(bool, elementwise_affine) = true;
  /// Learnable bias beside the weight. Fixed at construction.
  TORCH_ARG(bool, bias) = true;
  /// Columns of each rank, zero allowed; empty: balanced_shards. Fixed at construction.
  TORCH_ARG(std::vector<int64_t>, shard_sizes) = {};
  /// The ranks that hold a row; null is the living Environment's world. Fixed at construction.
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  /// Name in error messages, the same on all ranks. Empty: "TensorParallelLayerNorm-k".
  TORCH_ARG(std::string, name) = "";
};

/// Options of TensorParallelRMSNorm.
struct TensorParallelRMSNormOptions {
  /* implicit */ TensorParallelRMSNormOptions(int64_t hidden) : hidden_(hidden) {}

  /// As in TensorParallelLayerNormOptions.
  TORCH_ARG(int64_t, hidden);
  /// Added to the mean square.
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(bool, elementwise_affine) = true;
  TORCH_ARG(bool, bias) = false;
  /// Scale by (1 + weight), weight starting at zero, the sum taken in float or wider. Fixed at
  /// construction.
  TORCH_ARG(bool, unit_offset) = false;
  TORCH_ARG(std::vector<int64_t>, shard_sizes) = {};
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  TORCH_ARG(std::string, name) = "";
};

/// (normalised sum, new residual).
using NormAndResidual = std::pair<torch::Tensor, torch::Tensor>;

/// What TORCH_MODULE would make, and norm(input, residual) beside norm(input): a second forward in
/// the module itself would keep it out of torch::nn::Sequential.
template <typename Impl>
class ResidualNormHolder : public torch::nn::ModuleHolder<Impl> {
 public:
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;
  torch::Tensor operator()(const torch::Tensor& input) { return (*this)->forward(input); }
  NormAndResidual operator()(const torch::Tensor& input, const torch::Tensor& residual) {
    return (*this)->forward_residual(input, residual);
  }
};

/// What the two norms of split rows share: the shard's place and its parameters.
class TensorParallelNorm : public NamedModule, public ParallelModule, public GroupableNorm {
 public:
  /// This rank's columns of a whole row.
  const Sharding& shard() const { return shard_; }
  Sharding sharding_of(const std::string& name) const override;

 protected:
  using NamedModule::NamedModule;
  Sharding shard_;
};

/// Layer normalization of rows that are split over ranks (Ba, Kiros & Hinton 2016).
///
/// Input [..., h], h this rank's columns (see shard()), any leading dimensions, which all ranks
/// share; float, double, half or bfloat16, any strides. Each row's mean and biased variance are
/// those of the whole row of `hidden` values. One collective forward, one backward, none for weight
/// and bias [h], whose gradients are complete. Rows far from zero keep their digits: where sums
/// about zero would lose them, all ranks exchange a second time about the mean (see Counters).
///
/// Construction takes rank and size from the communicator, without communicating; it raises
/// c10::Error where there is neither a communicator nor an Environment. forward raises c10::Error
/// for a wrong shape or dtype before communicating; CommunicationError where ranks disagree (rows,
/// hidden, dtype, eps, order of layers).
class TensorParallelLayerNormImpl : public torch::nn::Cloneable<TensorParallelLayerNormImpl>,
                                    public TensorParallelNorm {
 public:
  explicit TensorParallelLayerNormImpl(int64_t hidden)
      : TensorParallelLayerNormImpl(TensorParallelLayerNormOptions(hidden)) {}
  explicit TensorParallelLayerNormImpl(TensorParallelLayerNormOptions options);

  torch::Tensor forward(const torch::Tensor& input);
  /// Pre-norm step, `norm(input, residual)`: returns (norm of the sum, the sum input + residual).
  /// The sum is rounded to the dtype of both first, and that rounded sum is what is normalised, as
  /// a later layer sees it.
  NormAndResidual forward_residual(const torch::Tensor& input, const torch::Tensor& residual);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  TensorParallelLayerNormOptions options;
  torch::Tensor weight;  ///< [h], undefined without elementwise_affine
  torch::Tensor bias;    ///< [h], undefined without bias

 private:
  PreparedNorm prepare(const torch::Tensor& input, const torch::Tensor& residual) override;
};
class TensorParallelLayerNorm : public ResidualNormHolder<TensorParallelLayerNormImpl> {
 public:
  using ResidualNormHolder<TensorParallelLayerNormImpl>::ResidualNormHolder;
};

/// Root-mean-square normalization of rows that are split over ranks (Zhang & Sennrich 2019).
///
/// As TensorParallelLayerNorm, without subtracting the mean: one word a row on the wire. Squares
/// are summed in double, so that no half or float row over- or underflows.
class TensorParallelRMSNormImpl : public torch::nn::Cloneable<TensorParallelRMSNormImpl>,
                                  public TensorParallelNorm {
 public:
  explicit TensorParallelRMSNormImpl(int64_t hidden)
      : TensorParallelRMSNormImpl(TensorParallelRMSNormOptions(hidden)) {}
  explicit TensorParallelRMSNormImpl(TensorParallelRMSNormOptions options);

  torch::Tensor forward(const torch::Tensor& input);
  /// See TensorParallelLayerNorm.
  NormAndResidual forward_residual(const torch::Tensor& input, const torch::Tensor& residual);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  TensorParallelRMSNormOptions options;
  torch::Tensor weight;
  torch::Tensor bias;

 private:
  PreparedNorm prepare(const torch::Tensor& input, const torch::Tensor& residual) override;
};
class TensorParallelRMSNorm : public ResidualNormHolder<TensorParallelRMSNormImpl> {
 public:
  using ResidualNormHolder<TensorParallelRMSNormImpl>::ResidualNormHolder;
};

namespace functional {

/// Options of functional::tensor_parallel_layer_norm: `weight`, `bias` are this rank's shards [h].
struct TensorParallelLayerNormFuncOptions {
  /* implicit */ TensorParallelLayerNormFuncOptions(int64_t hidden) : hidden_(hidden) {}

  /// Length of a whole row, over all ranks.
  TORCH_ARG(int64_t, hidden);
  TORCH_ARG(torch::Tensor, weight) = torch::Tensor();
  TORCH_ARG(torch::Tensor, bias) = torch::Tensor();
  TORCH_ARG(double, eps) = 1e-5;
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  TORCH_ARG(std::string, name) = "tensor_parallel_layer_norm";
};

/// Options of functional::tensor_parallel_rms_norm.
struct TensorParallelRMSNormFuncOptions {
  /* implicit */ TensorParallelRMSNormFuncOptions(int64_t hidden) : hidden_(hidden) {}

  TORCH_ARG(int64_t, hidden);
  TORCH_ARG(torch::Tensor, weight) = torch::Tensor();
  TORCH_ARG(torch::Tensor, bias) = torch::Tensor();
  TORCH_ARG(double, eps) = 1e-6;
  TORCH_ARG(bool, unit_offset) = false;
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  TORCH_ARG(std::string, name) = "tensor_parallel_rms_norm";
};

/// Functional forms; `input` [..., h]. The ranks' h must add up to hidden, which only the module
/// can check beforehand.
torch::Tensor tensor_parallel_layer_norm(const torch::Tensor& input,
                                         const TensorParallelLayerNormFuncOptions& options);
torch::Tensor tensor_parallel_rms_norm(const torch::Tensor& input,
                                       const TensorParallelRMSNormFuncOptions& options);

}  // namespace functional
}  // namespace syncnorm
