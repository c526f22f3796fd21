#include "dataset.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>

namespace segmentation {
namespace {

/// FNV-1a, 64 bits.
class Hash {
 public:
  void add(const void* data, size_t bytes) {
    const auto* at = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) value_ = (value_ ^ at[i]) * 1099511628211ULL;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 14695981039346656037ULL;
};

void measure_training_pixels(Dataset& dataset) {
  const auto indices = torch::tensor(dataset.train);
  const auto pixels = dataset.images.index_select(0, indices).to(torch::kFloat).div_(255);
  dataset.mean = pixels.mean({0, 2, 3});
  dataset.deviation = pixels.std({0, 2, 3}, /*unbiased=*/false).clamp_min_(1e-3);
}

}  // namespace

std::string Dataset::checksum() const {
  Hash hash;
  hash.add(images.sizes().data(), images.dim() * sizeof(int64_t));
  hash.add(images.const_data_ptr(), images.numel());
  hash.add(labels.const_data_ptr(), labels.numel());
  hash.add(train.data(), train.size() * sizeof(int64_t));
  hash.add(test.data(), test.size() * sizeof(int64_t));
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash.value()));
  return text;
}

Dataset load_dataset(const Recipe& recipe) {
  auto dataset = recipe.images.empty() ? load_brain_slices(recipe) : load_pairs(recipe);
  measure_training_pixels(dataset);
  return dataset;
}

void split_in_blocks(int64_t count, double fraction, int64_t blocks, int64_t gap,
                     std::vector<int64_t>& train, std::vector<int64_t>& test) {
  const auto wanted = static_cast<int64_t>(std::lround(fraction * static_cast<double>(count)));
  const auto held_out = std::clamp<int64_t>(wanted, std::min<int64_t>(1, count), count);
  blocks = std::clamp<int64_t>(blocks, 1, held_out);

  enum class Use { train, gap, test };
  std::vector<Use> use(count, Use::train);
  for (int64_t block = 0; block < blocks; ++block) {
    const auto length = (block + 1) * held_out / blocks - block * held_out / blocks;
    const auto start = (2 * block + 1) * count / (2 * blocks) - length / 2;
    const auto first = std::max<int64_t>(0, start - gap);
    const auto last = std::min(count, start + length + gap);
    for (auto i = first; i < last; ++i) {
      if (i >= start && i < start + length) {
        use[i] = Use::test;
      } else if (use[i] == Use::train) {
        use[i] = Use::gap;
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    if (use[i] == Use::train) train.push_back(i);
    if (use[i] == Use::test) test.push_back(i);
  }
  if (train.empty() || test.empty()) {
    throw std::runtime_error(
        "no pictures are left to train on: " + std::to_string(count) + " pictures, " +
        std::to_string(held_out) + " held out in " + std::to_string(blocks) +
        " blocks with gaps of " + std::to_string(gap) +
        ". Give more pictures, or lower --test-fraction, --test-blocks or --gap.");
  }
}

std::string ranges(const std::vector<int64_t>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i;
    while (end + 1 < numbers.size() && numbers[end + 1] == numbers[end] + 1) ++end;
    if (!text.empty()) text += ", ";
    text += std::to_string(numbers[i]);
    if (end > i) text += "-" + std::to_string(numbers[end]);
    i = end + 1;
  }
  return text;
}

}  // namespace segmentation
