#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "options.h"
#include "unet.h"

namespace segmentation {

/// How far a run has come.
struct Position {
  int64_t epoch = 0;   ///< epochs completed
  int64_t images = 0;  ///< pictures of the next one already seen, by all ranks together
  double loss = 0;     ///< their summed loss
};

/// What a checkpoint says of itself before any weight is read.
struct CheckpointHeader {
  nlohmann::json recipe;
  Position position;
  std::string checksum;  ///< of the dataset
};

/// Writes network, optimizer and header to `path`, whole or not at all (beside it first, then
/// renamed). For one rank.
void save_checkpoint(const std::string& path, const CheckpointHeader& header, const UNet& net,
                     const torch::optim::Optimizer& optimizer);

/// Raises std::runtime_error where `path` is missing or no checkpoint.
CheckpointHeader read_checkpoint_header(const std::string& path);

/// Reads the weights and the optimizer's state into a network and optimizer built from the header's
/// recipe.
void load_checkpoint(const std::string& path, UNet& net, torch::optim::Optimizer& optimizer);

}  // namespace segmentation
