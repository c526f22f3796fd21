#pragma once

#include <torch/torch.h>

#include <memory>
#include <vector>

#include "options.h"
#include "syncnorm/communicator.h"
#include "syncnorm/norm_linear.h"
#include "syncnorm/transformer.h"
#include "syncnorm/vocab_parallel.h"

namespace language_model {

/// A decoder-only transformer split over the ranks of a tensor group: embedding, blocks, and a
/// linear layer to the vocabulary, with a norm before it where the last block does not end in one.
class LanguageModelImpl : public torch::nn::Module {
 public:
  LanguageModelImpl(const Recipe& recipe, int64_t vocabulary,
                    const std::shared_ptr<syncnorm::Communicator>& tensor_group);

  /// Tokens int64 [windows, length], the same on all ranks of the group; returns this rank's
  /// columns of the logits, [windows, length, own vocabulary]. With `caches`, one for each block,
  /// the tokens follow those seen before.
  torch::Tensor forward(const torch::Tensor& tokens,
                        std::vector<syncnorm::KeyValueCache>* caches = nullptr);

  int64_t layers() const { return static_cast<int64_t>(blocks_->size()); }

 private:
  syncnorm::VocabParallelEmbedding embedding_{nullptr};
  torch::nn::ModuleList blocks_;
  syncnorm::NormColumnParallelLinear head_{nullptr};
};
TORCH_MODULE(LanguageModel);

/// The model of `recipe` in its dtype. The same initial weights for every number of ranks.
LanguageModel build_model(const Recipe& recipe, int64_t vocabulary,
                          const std::shared_ptr<syncnorm::Communicator>& tensor_group,
                          torch::Device device);

/// Elements of all parameters of the whole model.
int64_t count_parameters(const LanguageModel& model);

/// torch::kFloat or torch::kDouble.
torch::Dtype dtype_of(const Recipe& recipe);

}  // namespace language_model
