#pragma once

#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "syncnorm/linear.h"
#include "syncnorm/named_module.h"
#include "syncnorm/norm_linear.h"
#include "syncnorm/qk_norm.h"

namespace syncnorm {

/// Keys and values of the positions that one attention layer has seen, to go on from: [batch,
/// key heads of this rank, positions, head_dim] each, undefined before the first.
struct KeyValueCache {
  torch::Tensor key;
  torch::Tensor value;

  int64_t length() const { return key.defined() ? key.size(2) : 0; }
};

/// Options of ParallelAttention. All fixed at construction.
struct ParallelAttentionOptions {
  ParallelAttentionOptions(int64_t hidden, int64_t heads) : hidden_(hidden), heads_(heads) {}

  /// Features of the whole input, query heads over all ranks.
  TORCH_ARG(int64_t, hidden);
  TORCH_ARG(int64_t, heads);
  /// Key and value heads over all ranks, a divisor of heads (grouped-query attention); nullopt: as
  /// many. A rank holds those that its query heads use, so that ranks may share some.
  TORCH_ARG(std::optional<int64_t>, kv_heads) = std::nullopt;
  /// nullopt: hidden / heads.
  TORCH_ARG(std::optional<int64_t>, head_dim) = std::nullopt;
  /// Position t sees positions up to t.
  TORCH_ARG(bool, causal) = true;
  /// Base of rotary position embedding (Su et al. 2021), 10000 for instance; nullopt: none.
  TORCH_ARG(std::optional<double>, rope_theta) = std::nullopt;
  /// Normalise queries and keys, with a root-mean-square norm; nullopt: not.
  TORCH_ARG(std::optional<QKNormSpan>, qk_norm) = std::nullopt;
  /// Scores s become cap * tanh(s / cap) (Gemma 2); nullopt: not.
  TORCH_ARG(std::optional<double>, softcap) = std::nullopt;
  /// Normalise the input first; nullopt: not.
  TORCH_ARG(std::optional<NormKind>, norm) = std::nullopt;
  TORCH_ARG(std::optional<double>, eps) = std::nullopt;
  /// Biases of the linear layers.
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(Residual, residual) = Residual::replicated;
  /// Columns of each rank where the residual stream is sharded; empty: balanced.
  TORCH_ARG(std::vector<int64_t>, hidden_shards);
  TORCH_ARG(uint64_t, seed) = 0;
  TORCH_ARG(std::optional<double>, init_std) = std::nullopt;
  /// Factors on the initial weights of values and of the output.
  TORCH_ARG(double, value_init_scale) = 1.0;
  TORCH_ARG(double, out_init_scale) = 1.0;
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  TORCH_ARG(std::string, name) = "";
};

/// Multi-head self-attention with its heads split over ranks (Shoeybi et al. 2019).
///
/// Input and output [batch, positions, hidden] where the residual stream is replicated, [..., h]
/// where it is sharded. Communication forward and backward: replicated, one all-reduce each;
/// sharded, one all-gather and one reduce-scatter each. QK-norm, and key heads that ranks share,
/// add what QKNorm and ColumnParallelLinear say. Query heads are balanced over ranks; a rank may
/// hold none.
class ParallelAttentionImpl : public torch::nn::Cloneable<ParallelAttentionImpl>,
                              public NamedModule {
 public:
  ParallelAttentionImpl(int64_t hidden, int64_t heads)
      : ParallelAttentionImpl(ParallelAttentionOptions(hidden, heads)) {}
  explicit ParallelAttentionImpl(ParallelAttentionOptions options);

  /// With a cache, the input's positions follow those in it, and are added to it.
  torch::Tensor forward(const torch::Tensor& input, KeyValueCache* cache = nullptr);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  ParallelAttentionOptions options;
  NormColumnParallelLinear in_proj{nullptr};  ///< queries, keys, values of this rank's heads
  QKNorm qk_norm{nullptr};
  RowParallelLinear out_proj{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(static_cast<KeyValueCache*>(nullptr))})

 private:
  torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k,
                       const torch::Tensor& v) const;

  int64_t q_heads_ = 0, k_heads_ = 0;  // of this rank
  std::vector<int64_t> key_of_query_;  // local key head of each local query head
};
TORCH_MODULE(ParallelAttention);

}  // namespace syncnorm
