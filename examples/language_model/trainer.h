#pragma once

#include <torch/torch.h>

#include <memory>
#include <optional>
#include <vector>

#include "grid.h"
#include "model.h"
#include "syncnorm/data_parallel.h"
#include "syncnorm/sharding.h"
#include "tokens.h"

namespace language_model {

/// What a step tells the one who watches, the same on all ranks.
struct StepReport {
  double loss;       ///< nats a token, mean over the batch
  double grad_norm;  ///< before clipping
  double lr;
  bool stop;  ///< some rank was asked to stop
};

/// How well held-out text is foretold.
struct Scores {
  double nats_per_token, nats_per_byte;
  double perplexity;       ///< exp(nats_per_token)
  double byte_perplexity;  ///< exp(nats_per_byte), which does not depend on the tokenizer
  int64_t tokens, bytes;   ///< seen
};

/// A model in training on a grid of ranks: shards in each tensor group, replicas over data groups.
class Trainer {
 public:
  /// Draws the initial weights. The arguments live longer than the trainer. Collective.
  Trainer(const Recipe& recipe, const Tokens& tokens, const Grid& grid, torch::Device device);

  /// Takes step `number`, counted from 0. Raises job::Failure on all ranks, having left the weights
  /// alone, where loss or gradient is no longer a number. Collective.
  StepReport step(int64_t number);

  /// Scores over `windows` windows of held-out text. Collective.
  Scores evaluate(int64_t windows);

  /// All that a checkpoint holds: weights and AdamW's moments, as shards of whole tensors.
  std::vector<syncnorm::ShardedTensor> state();

  /// After `state` was loaded: tells AdamW how many steps its moments have seen.
  void set_steps_taken(int64_t steps);

  LanguageModel& model() { return model_; }

 private:
  torch::Tensor logits(const torch::Tensor& tokens);
  /// Mean cross-entropy of this rank's windows.
  torch::Tensor loss(const torch::Tensor& logits, const torch::Tensor& targets);

  const Recipe& recipe_;
  const Tokens& tokens_;
  const Grid& grid_;
  torch::Device device_;
  LanguageModel model_;
  std::optional<syncnorm::DistributedDataParallel<LanguageModel>>
      parallel_;  ///< several data ranks
  std::unique_ptr<torch::optim::AdamW> optimizer_;
};

}  // namespace language_model
