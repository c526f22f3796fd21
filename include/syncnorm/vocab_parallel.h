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

/// Options of VocabParallelEmbedding. All fixed at construction.
struct VocabParallelEmbeddingOptions {
  VocabParallelEmbeddingOptions(int64_t num_embeddings, int64_t embedding_dim)
      : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim) {}

  /// Tokens V of the whole vocabulary, and features of each.
  TORCH_ARG(int64_t, num_embeddings);
  TORCH_ARG(int64_t, embedding_dim);
  /// Tokens by rank; empty: balanced. Zero is allowed.
  TORCH_ARG(std::vector<int64_t>, shard_sizes);
  /// Return this rank's columns [..., out_shard_sizes[rank]] instead of all features.
  TORCH_ARG(bool, scatter_output) = false;
  /// Empty: balanced.
  TORCH_ARG(std::vector<int64_t>, out_shard_sizes);
  /// Seed of the initial weights, the same on all ranks.
  TORCH_ARG(uint64_t, seed) = 0;
  /// Standard deviation of the normally distributed initial weights.
  TORCH_ARG(double, init_std) = 1.0;
  /// The ranks that share the vocabulary; null: the living Environment's world.
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  /// Name in error messages; empty: "VocabParallelEmbedding-k", see NamedModule.
  TORCH_ARG(std::string, name) = "";
};

/// Embedding whose vocabulary is split over ranks (Shoeybi et al. 2019).
///
/// Input int64 [...], the same on all ranks, values in [0, num_embeddings); output [...,
/// embedding_dim], replicated, or [..., out_shard_sizes[rank]] with scatter_output. Parameter
/// weight [own tokens, embedding_dim]. Communication: forward one all-reduce, backward none; with
/// scatter_output a reduce-scatter and an all-gather. The whole table is drawn on the host from
/// `seed` and cut. Raises c10::Error before communicating for a token outside the vocabulary,
/// naming it.
class VocabParallelEmbeddingImpl : public torch::nn::Cloneable<VocabParallelEmbeddingImpl>,
                                   public NamedModule,
                                   public ParallelModule {
 public:
  VocabParallelEmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim)
      : VocabParallelEmbeddingImpl(VocabParallelEmbeddingOptions(num_embeddings, embedding_dim)) {}
  explicit VocabParallelEmbeddingImpl(VocabParallelEmbeddingOptions options_);

  torch::Tensor forward(const torch::Tensor& tokens);

  void reset() override;
  /// Draws the initial weights again, from the same seed.
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;
  Sharding sharding_of(const std::string& name) const override;

  VocabParallelEmbeddingOptions options;
  torch::Tensor weight;

 private:
  Sharding tokens_;
};
TORCH_MODULE(VocabParallelEmbedding);

/// Options of vocab_parallel_cross_entropy.
struct VocabParallelCrossEntropyOptions {
  /// Targets of this value count neither in the loss nor in the mean.
  TORCH_ARG(int64_t, ignore_index) = -100;
  /// Classes V of the whole vocabulary, for balanced shards.
  TORCH_ARG(int64_t, num_classes) = 0;
  /// Classes by rank; empty: num_classes balanced. One of the two is needed on more than one rank.
  TORCH_ARG(std::vector<int64_t>, shard_sizes);
  /// The ranks that share the vocabulary; null: the living Environment's world.
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  /// Name in error messages.
  TORCH_ARG(std::string, name) = "vocab_parallel_cross_entropy";
};

/// Mean cross-entropy of logits whose classes are split over ranks, as
/// torch::nn::functional::cross_entropy of the whole: -log softmax(logits)[target], averaged over
/// the targets that are not ignored (NaN where all are).
///
/// `logits` [..., shard_sizes[rank]] double, float, half or bfloat16; `targets` int64 [...],
/// classes of the whole, the same on all ranks. Returns a scalar, the same on all ranks: double for
/// double logits, otherwise float, in which half types are accumulated. One all-gather of three
/// words a row (largest logit, sum of exponentials, target's logit) forward, nothing backward: this
/// rank's gradient is softmax - onehot of its own classes. Under create_graph the gradient costs
/// one all-reduce and can be differentiated again. Raises c10::Error before communicating for wrong
/// shapes and for a target outside the vocabulary, naming it.
torch::Tensor vocab_parallel_cross_entropy(const torch::Tensor& logits,
                                           const torch::Tensor& targets,
                                           const VocabParallelCrossEntropyOptions& options = {});

}  // namespace syncnorm
