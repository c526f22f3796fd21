#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "syncnorm/communicator.h"
#include "syncnorm/named_module.h"
#include "syncnorm/sharding.h"

namespace syncnorm {

/// Ranges of a whole dimension by rank, as Sharding::ranges.
using RangesByRank = std::vector<std::vector<Range>>;

/// Rows of a fused query-key-value weight [(heads + 2 * kv_heads) * head_dim, in], whose whole
/// order is all query heads, all key heads, all value heads. Query heads are balanced over the
/// ranks, a rank may hold none; each rank holds every key and value head that one of its query
/// heads uses (query head q uses q / (heads / kv_heads)), so ranks may share some.
RangesByRank qkv_rows(int64_t heads, int64_t kv_heads, int64_t head_dim, int ranks);

/// Columns of the attention's output weight [out, heads * head_dim] that go with qkv_rows.
RangesByRank head_columns(int64_t heads, int64_t head_dim, int ranks);

/// Rows of a fused gated weight [2 * intermediate, in], whose whole order is gate, up. Each rank
/// holds the same balanced part of both.
RangesByRank gate_up_rows(int64_t intermediate, int ranks);

/// Options of ColumnParallelLinear. All fixed at construction.
struct ColumnParallelLinearOptions {
  ColumnParallelLinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}

  /// Features of the whole input and output.
  TORCH_ARG(int64_t, in_features);
  TORCH_ARG(int64_t, out_features);
  TORCH_ARG(bool, bias) = true;
  /// Rows of the whole weight that each rank holds; empty: balanced. Ranks may share rows, whose
  /// gradient is then summed over them; together they hold all.
  TORCH_ARG(RangesByRank, rows);
  /// The input is split by columns, [..., in_shard_sizes[rank]], and is gathered; otherwise it is
  /// replicated.
  TORCH_ARG(bool, input_is_sharded) = false;
  /// Empty: balanced.
  TORCH_ARG(std::vector<int64_t>, in_shard_sizes);
  /// Return the whole output on every rank, for use alike on all. Needs consecutive rows.
  TORCH_ARG(bool, gather_output) = false;
  /// Seed of the initial weights, the same on all ranks; layers of a model need different ones.
  TORCH_ARG(uint64_t, seed) = 0;
  /// Standard deviation of normally distributed initial weights, with zero biases; nullopt: the
  /// uniform distribution of torch::nn::Linear.
  TORCH_ARG(std::optional<double>, init_std) = std::nullopt;
  /// Factor on the initial weights.
  TORCH_ARG(double, init_scale) = 1.0;
  /// The ranks that share the weight; null: the living Environment's world.
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  /// Name in error messages; empty: "ColumnParallelLinear-k", see NamedModule.
  TORCH_ARG(std::string, name) = "";
};

/// y = x W^T + b with the rows of W [out_features, in_features] split over ranks (Shoeybi et al.
/// 2019).
///
/// Input [..., in_features], replicated, or [..., in_shard_sizes[rank]]; output [..., rows of this
/// rank] in the order of its ranges, or [..., out_features] with gather_output. Parameters weight
/// [own rows, in_features] and bias [own rows]. Communication: forward none, backward one
/// all-reduce of the input's gradient; with input_is_sharded an all-gather and a reduce-scatter
/// instead; gather_output adds an all-gather forward; shared rows one all-reduce backward for each
/// of weight and bias. Whole weights are drawn on the host from `seed` and cut, so every number of
/// ranks starts from the same ones. Raises c10::Error, before communicating, for a wrong shape,
/// dtype or device, and at construction where there is no communicator.
class ColumnParallelLinearImpl : public torch::nn::Cloneable<ColumnParallelLinearImpl>,
                                 public NamedModule,
                                 public ParallelModule {
 public:
  ColumnParallelLinearImpl(int64_t in_features, int64_t out_features)
      : ColumnParallelLinearImpl(ColumnParallelLinearOptions(in_features, out_features)) {}
  explicit ColumnParallelLinearImpl(ColumnParallelLinearOptions options_);

  torch::Tensor forward(const torch::Tensor& input);

  void reset() override;
  /// Draws the initial weights again, from the same seed.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  Sharding sharding_of(const std::string& name) const override;

  /// weight and bias as forward uses them: their gradient is summed over the ranks that share rows.
  torch::Tensor used_weight() const;
  torch::Tensor used_bias() const;

  ColumnParallelLinearOptions options;
  torch::Tensor weight;
  torch::Tensor bias;

 private:
  Sharding rows_;
  bool shares_rows_ = false;
};
TORCH_MODULE(ColumnParallelLinear);

/// Options of RowParallelLinear. All fixed at construction.
struct RowParallelLinearOptions {
  RowParallelLinearOptions(int64_t in_features, int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}

  /// Features of the whole input and output.
  TORCH_ARG(int64_t, in_features);
  TORCH_ARG(int64_t, out_features);
  TORCH_ARG(bool, bias) = true;
  /// Columns of the whole weight that each rank holds, every one on one rank; empty: balanced.
  TORCH_ARG(RangesByRank, columns);
  /// Return this rank's columns of the output instead of the whole.
  TORCH_ARG(bool, scatter_output) = false;
  /// Empty: balanced.
  TORCH_ARG(std::vector<int64_t>, out_shard_sizes);
  /// As in ColumnParallelLinearOptions.
  TORCH_ARG(uint64_t, seed) = 0;
  TORCH_ARG(std::optional<double>, init_std) = std::nullopt;
  TORCH_ARG(double, init_scale) = 1.0;
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  /// Name in error messages; empty: "RowParallelLinear-k", see NamedModule.
  TORCH_ARG(std::string, name) = "";
};

/// y = x W^T + b with the columns of W [out_features, in_features], and so those of x, split over
/// ranks.
///
/// Input [..., columns of this rank]; output [..., out_features], replicated, or
/// [..., out_shard_sizes[rank]] with scatter_output. Parameters weight [out_features, own columns]
/// and bias, [out_features] on every rank or [out_shard_sizes[rank]], added once after the sum.
/// Communication: forward one all-reduce, backward none; with scatter_output a reduce-scatter and
/// an all-gather. Initial weights and errors as ColumnParallelLinear's.
class RowParallelLinearImpl : public torch::nn::Cloneable<RowParallelLinearImpl>,
                              public NamedModule,
                              public ParallelModule {
 public:
  RowParallelLinearImpl(int64_t in_features, int64_t out_features)
      : RowParallelLinearImpl(RowParallelLinearOptions(in_features, out_features)) {}
  explicit RowParallelLinearImpl(RowParallelLinearOptions options_);

  torch::Tensor forward(const torch::Tensor& input);

  void reset() override;
  /// Draws the initial weights again, from the same seed.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  Sharding sharding_of(const std::string& name) const override;

  RowParallelLinearOptions options;
  torch::Tensor weight;
  torch::Tensor bias;

 private:
  Sharding columns_;
  Sharding outputs_;  // of the bias
};
TORCH_MODULE(RowParallelLinear);

}  // namespace syncnorm
