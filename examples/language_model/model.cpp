#include "model.h"

#include <cmath>
#include <map>
#include <optional>

#include "syncnorm/sharding.h"

namespace language_model {
namespace {

using syncnorm::Placement;

Placement placement_of(const Recipe& recipe) {
  static const std::map<std::string, Placement> names = {{"pre", Placement::pre},
                                                         {"post", Placement::post},
                                                         {"sandwich", Placement::sandwich},
                                                         {"deepnorm", Placement::deepnorm}};
  return names.at(recipe.placement);
}

std::optional<syncnorm::QKNormSpan> qk_norm_of(const Recipe& recipe) {
  if (recipe.qk_norm == "none") return std::nullopt;
  return recipe.qk_norm == "head" ? syncnorm::QKNormSpan::head : syncnorm::QKNormSpan::width;
}

syncnorm::NormKind norm_of(const Recipe& recipe) {
  return recipe.norm == "layer" ? syncnorm::NormKind::layer : syncnorm::NormKind::rms;
}

syncnorm::Residual residual_of(const Recipe& recipe) {
  return recipe.residual == "sharded" ? syncnorm::Residual::sharded
                                      : syncnorm::Residual::replicated;
}

syncnorm::Activation activation_of(const Recipe& recipe) {
  return recipe.activation == "gelu" ? syncnorm::Activation::gelu : syncnorm::Activation::swiglu;
}

/// 4 times the hidden size, or 8/3 of it, which makes as many weights with the third matrix, up to
/// a multiple of 8.
int64_t intermediate_of(const Recipe& recipe) {
  if (recipe.intermediate > 0) return recipe.intermediate;
  if (recipe.activation == "gelu") return 4 * recipe.hidden;
  return (8 * recipe.hidden / 3 + 7) / 8 * 8;
}

/// Seeds of the parts of a model, different for each and for each recipe.seed.
uint64_t seed_of(const Recipe& recipe, int64_t part) {
  return recipe.seed * 1000003 + static_cast<uint64_t>(part) * 1009;
}

constexpr double kInitStd = 0.02;
constexpr double kRotaryBase = 10000;

syncnorm::ParallelTransformerBlockOptions block_options(const Recipe& recipe) {
  auto options = syncnorm::ParallelTransformerBlockOptions(recipe.hidden, recipe.heads)
                     .intermediate(intermediate_of(recipe))
                     .activation(activation_of(recipe))
                     .placement(placement_of(recipe))
                     .norm(norm_of(recipe))
                     .residual(residual_of(recipe))
                     .rope_theta(kRotaryBase)
                     .qk_norm(qk_norm_of(recipe))
                     .init_std(kInitStd);
  if (recipe.kv_heads > 0) options.kv_heads(recipe.kv_heads);
  if (recipe.softcap > 0) options.softcap(recipe.softcap);
  if (recipe.placement == "deepnorm") {
    options.deepnorm(syncnorm::DeepNorm::decoder(recipe.layers));
  } else {
    options.out_init_scale(1 / std::sqrt(2.0 * static_cast<double>(recipe.layers)));
  }
  return options;
}

}  // namespace

LanguageModelImpl::LanguageModelImpl(const Recipe& recipe, int64_t vocabulary,
                                     const std::shared_ptr<syncnorm::Communicator>& tensor_group) {
  embedding_ = register_module(
      "embedding", syncnorm::VocabParallelEmbedding(
                       syncnorm::VocabParallelEmbeddingOptions(vocabulary, recipe.hidden)
                           .scatter_output(residual_of(recipe) == syncnorm::Residual::sharded)
                           .seed(seed_of(recipe, 0))
                           .init_std(kInitStd)
                           .communicator(tensor_group)));
  register_module("blocks", blocks_);
  for (int64_t layer = 0; layer < recipe.layers; ++layer) {
    blocks_->push_back(syncnorm::ParallelTransformerBlock(
        block_options(recipe).seed(seed_of(recipe, layer + 1)).communicator(tensor_group)));
  }
  const auto placement = placement_of(recipe);
  const bool ends_in_norm = placement == Placement::post || placement == Placement::deepnorm;
  head_ = register_module(
      "head", syncnorm::NormColumnParallelLinear(
                  syncnorm::NormColumnParallelLinearOptions(recipe.hidden, vocabulary)
                      .norm(ends_in_norm ? std::nullopt : std::optional(norm_of(recipe)))
                      .residual(residual_of(recipe))
                      .bias(false)
                      .seed(seed_of(recipe, recipe.layers + 1))
                      .init_std(kInitStd)
                      .communicator(tensor_group)));
}

torch::Tensor LanguageModelImpl::forward(const torch::Tensor& tokens,
                                         std::vector<syncnorm::KeyValueCache>* caches) {
  auto x = embedding_->forward(tokens);
  for (int64_t layer = 0; layer < layers(); ++layer) {
    auto* cache = caches == nullptr ? nullptr : &caches->at(layer);
    x = blocks_->at<syncnorm::ParallelTransformerBlockImpl>(layer).forward(x, cache);
  }
  return head_->forward(x);
}

LanguageModel build_model(const Recipe& recipe, int64_t vocabulary,
                          const std::shared_ptr<syncnorm::Communicator>& tensor_group,
                          torch::Device device) {
  LanguageModel model(recipe, vocabulary, tensor_group);
  model->to(device, dtype_of(recipe));
  return model;
}

int64_t count_parameters(const LanguageModel& model) {
  int64_t count = 0;
  for (const auto& part : syncnorm::sharded_tensors(*model, /*buffers=*/false)) {
    int64_t elements = 1;
    for (const auto size : part.sharding.whole_shape(part.tensor.sizes())) elements *= size;
    count += elements;
  }
  return count;
}

torch::Dtype dtype_of(const Recipe& recipe) {
  return recipe.dtype == "double" ? torch::kDouble : torch::kFloat;
}

}  // namespace language_model
