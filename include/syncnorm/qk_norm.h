#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "syncnorm/communicator.h"
#include "syncnorm/named_module.h"
#include "syncnorm/sharding.h"

namespace syncnorm {

enum class NormKind { layer, rms };

/// What QKNorm takes statistics over.
enum class QKNormSpan {
  head,   ///< each head by itself, one weight [head_dim] for all heads of Q and one for those of K
  width,  ///< all heads of Q together, all heads of K together, a weight for each position
};

/// Options of QKNorm.
struct QKNormOptions {
  QKNormOptions(int64_t heads, int64_t head_dim)
      : heads_(heads), kv_heads_(heads), head_dim_(head_dim) {}

  /// Query heads over all ranks, key heads over all ranks (a divisor of heads), values a head.
  /// Fixed at construction.
  TORCH_ARG(int64_t, heads);
  TORCH_ARG(int64_t, kv_heads);
  TORCH_ARG(int64_t, head_dim);
  TORCH_ARG(QKNormSpan, span) = QKNormSpan::head;
  TORCH_ARG(NormKind, norm) = NormKind::rms;
  /// Added to the mean square or variance. May be changed at any time, on all ranks.
  TORCH_ARG(double, eps) = 1e-6;
  /// Learnable weights. Fixed at construction.
  TORCH_ARG(bool, affine) = true;
  /// The ranks over which heads are split as by qkv_rows; null is the living Environment's world.
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  /// Name in error messages, the same on all ranks. Empty: "QKNorm-k".
  TORCH_ARG(std::string, name) = "";
};

/// Normalization of queries and keys before attention (Henry et al. 2020; per head as in Dehghani
/// et al. 2023, over the full width as in OLMo 2).
///
/// forward takes Q [..., q, head_dim] and K [..., k, head_dim], q and k this rank's heads, any
/// leading dimensions that both share. Per head it costs no collective forward and one backward,
/// which sums the weights' gradients; over the width one collective forward for Q and K together,
/// one backward. A key head that several ranks hold counts once in the statistics, and the
/// gradients that its holders bring are parts of one: their dx add up to the whole one's. Weights
/// are replicated per head and shards over the width; their gradients are complete.
class QKNormImpl : public torch::nn::Cloneable<QKNormImpl>,
                   public NamedModule,
                   public ParallelModule {
 public:
  QKNormImpl(int64_t heads, int64_t head_dim) : QKNormImpl(QKNormOptions(heads, head_dim)) {}
  explicit QKNormImpl(QKNormOptions options);

  std::pair<torch::Tensor, torch::Tensor> forward(const torch::Tensor& q, const torch::Tensor& k);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  Sharding sharding_of(const std::string& name) const override;

  QKNormOptions options;
  torch::Tensor q_weight;  ///< [head_dim] per head, [q * head_dim] over the width
  torch::Tensor k_weight;  ///< [head_dim] per head, [k * head_dim] over the width

 private:
  torch::Tensor weight_by_head() const;

  std::shared_ptr<Communicator> comm_;
  Sharding q_shard_, k_shard_;  // in values, not heads
};
TORCH_MODULE(QKNorm);

}  // namespace syncnorm
