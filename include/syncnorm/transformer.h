#pragma once

#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "syncnorm/attention.h"
#include "syncnorm/mlp.h"

namespace syncnorm {

/// Where a transformer block normalises; f is attention, then the feed-forward network.
enum class Placement {
  pre,       ///< x + f(norm(x))
  post,      ///< norm(x + f(x))
  sandwich,  ///< x + norm(f(norm(x)))
  deepnorm,  ///< norm(alpha*x + f(x)), weights scaled by beta (Wang et al. 2022)
};

/// Constants of DeepNorm.
struct DeepNorm {
  double alpha = 1;  ///< factor on the residual stream
  double beta = 1;   ///< factor on initial weights of values, attention's output and feed-forward

  /// Table 1 of Wang et al. 2022, "DeepNet: Scaling Transformers to 1,000 Layers".
  static DeepNorm encoder(int64_t layers);
  static DeepNorm decoder(int64_t layers);
  /// (encoder's, decoder's) of a model that has both.
  static std::pair<DeepNorm, DeepNorm> encoder_decoder(int64_t encoder_layers,
                                                       int64_t decoder_layers);
};

/// Options of ParallelTransformerBlock; those it shares with ParallelAttentionOptions and
/// ParallelMLPOptions mean the same. All fixed at construction.
struct ParallelTransformerBlockOptions {
  ParallelTransformerBlockOptions(int64_t hidden, int64_t heads) : hidden_(hidden), heads_(heads) {}

  TORCH_ARG(int64_t, hidden);
  TORCH_ARG(int64_t, heads);
  TORCH_ARG(std::optional<int64_t>, kv_heads) = std::nullopt;
  TORCH_ARG(std::optional<int64_t>, head_dim) = std::nullopt;
  /// nullopt: 4 * hidden.
  TORCH_ARG(std::optional<int64_t>, intermediate) = std::nullopt;
  TORCH_ARG(Activation, activation) = Activation::gelu;
  TORCH_ARG(Placement, placement) = Placement::pre;
  TORCH_ARG(NormKind, norm) = NormKind::rms;
  TORCH_ARG(Residual, residual) = Residual::replicated;
  TORCH_ARG(bool, causal) = true;
  TORCH_ARG(std::optional<double>, rope_theta) = std::nullopt;
  TORCH_ARG(std::optional<QKNormSpan>, qk_norm) = std::nullopt;
  TORCH_ARG(std::optional<double>, softcap) = std::nullopt;
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(std::optional<double>, eps) = std::nullopt;
  /// For placement deepnorm: DeepNorm::decoder(layers), for instance.
  TORCH_ARG(std::optional<DeepNorm>, deepnorm) = std::nullopt;
  TORCH_ARG(std::vector<int64_t>, hidden_shards);
  TORCH_ARG(uint64_t, seed) = 0;
  TORCH_ARG(std::optional<double>, init_std) = std::nullopt;
  /// Factor on the initial weights that write to the residual stream, 1/sqrt(2*layers) for
  /// instance; not with deepnorm, which has its own.
  TORCH_ARG(double, out_init_scale) = 1.0;
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  TORCH_ARG(std::string, name) = "";
};

/// One layer of a transformer, its heads and feed-forward features split over ranks, its residual
/// stream whole on every rank or split by columns.
///
/// Input and output [batch, positions, hidden], or [..., h] where the stream is sharded.
/// Collectives forward, and as many backward: replicated 2 all-reduces; sharded 2 all-gathers and 2
/// reduce-scatters, which move the same bytes over the wire, plus statistics. The norms in front of
/// attention and feed-forward add none; with a sharded stream those behind them (post, sandwich,
/// deepnorm) add one all-reduce of statistics each.
class ParallelTransformerBlockImpl : public torch::nn::Cloneable<ParallelTransformerBlockImpl>,
                                     public NamedModule {
 public:
  ParallelTransformerBlockImpl(int64_t hidden, int64_t heads)
      : ParallelTransformerBlockImpl(ParallelTransformerBlockOptions(hidden, heads)) {}
  explicit ParallelTransformerBlockImpl(ParallelTransformerBlockOptions options);

  torch::Tensor forward(const torch::Tensor& input, KeyValueCache* cache = nullptr);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  ParallelTransformerBlockOptions options;
  ParallelAttention attention{nullptr};
  ParallelMLP mlp{nullptr};
  torch::nn::AnyModule attention_norm;  ///< behind attention; empty for placement pre
  torch::nn::AnyModule mlp_norm;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(static_cast<KeyValueCache*>(nullptr))})

 private:
  torch::nn::AnyModule make_norm(const std::string& name);
  torch::Tensor add(const torch::Tensor& stream, const torch::Tensor& change,
                    torch::nn::AnyModule& norm) const;
};
TORCH_MODULE(ParallelTransformerBlock);

}  // namespace syncnorm
