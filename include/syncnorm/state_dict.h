#pragma once

#include <torch/torch.h>

#include <string>

namespace syncnorm {

/// Writes parameters and buffers of `module` as a dict of tensors with PyTorch's key names, in a
/// file that Python's torch.load reads. The file appears whole or not at all (written beside and
/// renamed).
void save_state_dict(const torch::nn::Module& module, const std::string& path);

/// The same for tensors at hand, those of gather_state_dict for instance.
void save_state_dict(const torch::OrderedDict<std::string, torch::Tensor>& state,
                     const std::string& path);

/// The tensors of a file of save_state_dict or of Python's torch.save(module.state_dict()), by key.
torch::OrderedDict<std::string, torch::Tensor> read_state_dict(const std::string& path);

/// Reads a file of save_state_dict or of Python's torch.save(module.state_dict()) into `module`, in
/// place. Raises c10::Error naming the keys where one is missing, unexpected or of another shape,
/// having changed nothing.
void load_state_dict(torch::nn::Module& module, const std::string& path);

}  // namespace syncnorm
