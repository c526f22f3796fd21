#pragma once

#include <torch/torch.h>

#include <memory>

#include "syncnorm/communicator.h"

namespace syncnorm {

/// Swaps every BatchNorm1d/2d/3d in the tree of `module` for a SyncBatchNorm over `comm` (null: the
/// Environment's world) and returns the root, which is a new module only where `module` itself is a
/// BatchNorm.
///
/// Keeps parameters and buffers (the very tensors, so optimizers stay valid), device, dtype,
/// requires_grad, training flag and names; a module held in several places stays shared. Reaches
/// registered children, Sequential, ModuleList and ModuleDict. Raises c10::Error, having changed
/// nothing, where somebody else still owns a BatchNorm (a typed member of the parent, an outside
/// holder) and would go on calling it; the message names the path and the cure.
std::shared_ptr<torch::nn::Module> convert_sync_batchnorm(
    const std::shared_ptr<torch::nn::Module>& module,
    const std::shared_ptr<Communicator>& comm = nullptr);

/// The inverse: every SyncBatchNorm becomes the BatchNorm1d/2d/3d it came from (or that fits the
/// inputs it has seen; 2d where neither is known). Same guarantees. Both refuse classes derived
/// from the one they replace, whose own forward would be lost.
std::shared_ptr<torch::nn::Module> revert_sync_batchnorm(
    const std::shared_ptr<torch::nn::Module>& module);

/// Gives every syncnorm module in the tree its path ("encoder.0.bn1") as name for error messages,
/// where it has none.
void name_modules(torch::nn::Module& module);

}  // namespace syncnorm
