#pragma once

#include <torch/torch.h>

#include <map>
#include <string>

namespace syncnorm {

/// Writes tensors in the safetensors format of Hugging Face: a little-endian 64-bit header length,
/// a JSON header {name: {dtype, shape, data_offsets}, "__metadata__": {string: string}}, raw
/// little-endian rows. Dtypes double, float, half, bfloat16, integers of 8 to 64 bits and bool.
/// Tensors may be on any device and have any strides; one at a time is brought to the host. The
/// file appears whole or not at all (written beside and renamed). Python's `transformers` asks for
/// the metadata
/// {"format", "pt"}. Raises c10::Error that names the tensor or the file.
void save_safetensors(const std::string& path,
                      const torch::OrderedDict<std::string, torch::Tensor>& tensors,
                      const std::map<std::string, std::string>& metadata = {});

/// The tensors of a safetensors file, in its header's order, on the host. Raises c10::Error that
/// names the file where it cannot be read or anything in its header is not as the format demands:
/// lengths, dtypes, shapes, and offsets that leave no byte out and none to two tensors.
torch::OrderedDict<std::string, torch::Tensor> load_safetensors(const std::string& path);

/// The "__metadata__" of a safetensors file; empty where it has none.
std::map<std::string, std::string> read_safetensors_metadata(const std::string& path);

}  // namespace syncnorm
