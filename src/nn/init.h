#pragma once

#include <torch/torch.h>

#include <optional>

#include "syncnorm/sharding.h"

namespace syncnorm {

/// How the initial values of a layer are drawn: on the host, whole, from a generator of their own,
/// so that they depend on the seed and the whole shape alone.
struct Initialization {
  uint64_t seed = 0;
  std::optional<double> std;  ///< normal with this deviation; nullopt: as torch::nn::Linear
  double scale = 1;           ///< factor on the weight
};

/// Fills this rank's shards of a linear layer. `bias` may be undefined. The values are those of
/// torch::nn::Linear after torch::manual_seed(seed), where neither std nor scale is given; with std
/// the bias is zero. Shards keep their dtype and device.
void init_linear(const torch::Tensor& weight, const Sharding& weight_sharding,
                 const torch::Tensor& bias, const Sharding& bias_sharding,
                 const Initialization& init);

/// Fills this rank's shard of an embedding table with normal values; std nullopt: 1.
void init_embedding(const torch::Tensor& weight, const Sharding& sharding,
                    const Initialization& init);

}  // namespace syncnorm
