#pragma once

#include <string>
#include <vector>

#include "dataset.h"
#include "evaluate.h"

namespace segmentation {

/// Up to `count` of `indices`, evenly spread.
std::vector<int64_t> spread(const std::vector<int64_t>& indices, int64_t count);

/// Writes predictions.json and predictions.bin to `folder` for plots.py: for each picture its bytes
/// [channels, height, width], its labels and the predicted classes [height, width].
void write_predictions(const std::string& folder, const Dataset& dataset,
                       const std::vector<int64_t>& indices, const torch::Tensor& predicted);

}  // namespace segmentation
