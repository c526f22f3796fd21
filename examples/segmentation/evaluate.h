#pragma once

#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "augment.h"
#include "syncnorm/communicator.h"
#include "unet.h"

namespace segmentation {

/// What a confusion matrix says. Means are over the classes that occur in truth or prediction;
/// others are NaN.
struct Scores {
  torch::Tensor confusion;  ///< int64 [truth, prediction], pixels
  std::vector<double> iou;  ///< intersection over union by class
  double mean_iou = 0;
  double dice = 0;      ///< mean over classes of 2 |A and B| / (|A| + |B|)
  double accuracy = 0;  ///< share of pixels right
};

Scores score(const torch::Tensor& confusion);
nlohmann::json to_json(const Scores& scores);

/// Class of each pixel, uint8 [n, height, width], with the network in evaluation mode.
torch::Tensor predict(UNet& net, const Dataset& dataset, const std::vector<int64_t>& indices,
                      torch::Device device);

/// Scores over the pictures `indices`, each predicted by one rank; the same on all ranks. One
/// all-reduce. Collective.
Scores evaluate(UNet& net, const Dataset& dataset, const std::vector<int64_t>& indices,
                torch::Device device, syncnorm::Communicator& comm);

}  // namespace segmentation
