#pragma once

#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "syncnorm/linear.h"
#include "syncnorm/named_module.h"
#include "syncnorm/norm_linear.h"

namespace syncnorm {

enum class Activation {
  gelu,    ///< gelu(x W1^T) W2^T
  swiglu,  ///< (silu(x G^T) * (x U^T)) W2^T (Shazeer 2020)
};

/// Options of ParallelMLP; those it shares with ParallelAttentionOptions mean the same. All fixed
/// at construction.
struct ParallelMLPOptions {
  ParallelMLPOptions(int64_t hidden, int64_t intermediate)
      : hidden_(hidden), intermediate_(intermediate) {}

  TORCH_ARG(int64_t, hidden);
  /// Features between the two layers, over all ranks.
  TORCH_ARG(int64_t, intermediate);
  TORCH_ARG(Activation, activation) = Activation::gelu;
  TORCH_ARG(std::optional<NormKind>, norm) = std::nullopt;
  TORCH_ARG(std::optional<double>, eps) = std::nullopt;
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(Residual, residual) = Residual::replicated;
  TORCH_ARG(std::vector<int64_t>, hidden_shards);
  TORCH_ARG(uint64_t, seed) = 0;
  TORCH_ARG(std::optional<double>, init_std) = std::nullopt;
  TORCH_ARG(double, in_init_scale) = 1.0;
  TORCH_ARG(double, out_init_scale) = 1.0;
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  TORCH_ARG(std::string, name) = "";
};

/// Feed-forward network of two linear layers, split between them over ranks. Input, output and
/// communication as ParallelAttention's.
class ParallelMLPImpl : public torch::nn::Cloneable<ParallelMLPImpl>, public NamedModule {
 public:
  ParallelMLPImpl(int64_t hidden, int64_t intermediate)
      : ParallelMLPImpl(ParallelMLPOptions(hidden, intermediate)) {}
  explicit ParallelMLPImpl(ParallelMLPOptions options);

  torch::Tensor forward(const torch::Tensor& input);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  ParallelMLPOptions options;
  NormColumnParallelLinear in_proj{nullptr};
  RowParallelLinear out_proj{nullptr};
};
TORCH_MODULE(ParallelMLP);

}  // namespace syncnorm
