#include "augment.h"

#include <ATen/CPUGeneratorImpl.h>

namespace segmentation {
namespace {

/// The finalizer of splitmix64: spreads neighbouring seeds over all 64 bits.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

void augment(torch::Tensor picture, torch::Tensor labels, const Recipe& recipe, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto chance = torch::rand({2}, generator);
  if (chance[0].item<float>() < 0.5f) {
    picture.copy_(picture.flip({2}));
    labels.copy_(labels.flip({1}));
  }
  if (recipe.contrast > 0) picture.mul_(1 + recipe.contrast * (2 * chance[1].item<double>() - 1));
  if (recipe.noise > 0) picture.add_(torch::randn(picture.sizes(), generator), recipe.noise);
}

}  // namespace

Batch plain_batch(const Dataset& dataset, const std::vector<int64_t>& indices) {
  const auto chosen = torch::tensor(indices, torch::kLong);
  const auto channel = [](const torch::Tensor& values) { return values.view({1, -1, 1, 1}); };
  Batch batch;
  batch.pictures = dataset.images.index_select(0, chosen).to(torch::kFloat).div_(255);
  batch.pictures.sub_(channel(dataset.mean)).div_(channel(dataset.deviation));
  batch.labels = dataset.labels.index_select(0, chosen).to(torch::kLong);
  return batch;
}

Batch training_batch(const Dataset& dataset, const std::vector<int64_t>& indices,
                     const Recipe& recipe, int64_t epoch) {
  auto batch = plain_batch(dataset, indices);
  if (recipe.no_augment) return batch;
  for (size_t i = 0; i < indices.size(); ++i) {
    const auto seed = mix(mix(mix(recipe.seed) + static_cast<uint64_t>(epoch)) +
                          static_cast<uint64_t>(indices[i]));
    augment(batch.pictures[i], batch.labels[i], recipe, seed);
  }
  return batch;
}

}  // namespace segmentation
