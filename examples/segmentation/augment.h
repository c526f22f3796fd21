#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "dataset.h"
#include "options.h"

namespace segmentation {

struct Batch {
  torch::Tensor pictures;  ///< float [n, channels, height, width], mean 0 and deviation 1 over the
                           ///< training pictures
  torch::Tensor labels;    ///< int64 [n, height, width]
};

/// Samples `indices` as they are. n may be 0.
Batch plain_batch(const Dataset& dataset, const std::vector<int64_t>& indices);

/// Samples `indices` with a flip left to right, noise and contrast, drawn for each from (seed,
/// epoch, index) alone: it does not matter which rank draws a sample, or in which batch.
Batch training_batch(const Dataset& dataset, const std::vector<int64_t>& indices,
                     const Recipe& recipe, int64_t epoch);

}  // namespace segmentation
