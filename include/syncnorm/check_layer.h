#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "syncnorm/communicator.h"
#include "syncnorm/sharding.h"

namespace syncnorm {

/// A tensor-parallel layer to be held against itself on one rank, and what is expected of it.
struct LayerCheck {
  std::string name = "layer";

  /// Makes the layer over a group. Called with the group that is tested and, for the whole layer,
  /// with a group of one; parameters must have the same names on both.
  std::function<std::shared_ptr<torch::nn::Module>(const std::shared_ptr<Communicator>&)> make;

  /// Runs it. `layer` is what `make` made.
  std::function<torch::Tensor(torch::nn::Module& layer, const torch::Tensor& input)> forward;

  /// Shape of the whole input.
  std::vector<int64_t> input_shape;

  /// How input and output are cut: the cut of the whole over a group of this communicator.
  /// Undefined: replicated.
  std::function<Sharding(const std::shared_ptr<Communicator>&)> input_sharding;
  std::function<Sharding(const std::shared_ptr<Communicator>&)> output_sharding;

  /// How a parameter is cut, where the layer's modules do not say it as ParallelModule. `name` is
  /// its path.
  std::function<Sharding(const std::string& name, const std::shared_ptr<Communicator>&)>
      parameter_sharding;

  torch::ScalarType dtype = torch::kDouble;
  uint64_t seed = 0;

  /// Allowed error in ULPs beyond twice the whole layer's own; nullopt: 64 in double, where the
  /// whole layer is itself the reference and only the order of sums differs, 16 in float, 2 in half
  /// types.
  std::optional<double> tolerance_ulps;

  /// Collectives and payload bytes of one forward and one backward on this rank, checked where
  /// given.
  std::optional<int64_t> forward_collectives, forward_bytes;
  std::optional<int64_t> backward_collectives, backward_bytes;
};

/// What check_layer found, the same on all ranks.
struct LayerReport {
  struct Line {
    std::string quantity;
    double split_ulps = 0;  ///< error of the layer over ranks
    double whole_ulps = 0;  ///< error of the whole layer in the same dtype
    double limit_ulps = 0;
    bool passed = false;
  };
  struct Count {
    std::string quantity;
    int64_t measured = 0;  ///< the largest of all ranks
    std::optional<int64_t> expected;
    bool passed = false;  ///< on every rank
  };

  std::string title;
  std::vector<Line> lines;
  std::vector<Count> counts;

  bool passed() const;
  /// For people: a table, its last line "passed" or "FAILED: ...".
  std::string table() const;
};

/// Runs a layer split over the ranks of `comm`, and whole on one, with the same parameters and
/// input, forward and backward, and compares output, input gradient and every parameter gradient
/// with the whole layer in double.
///
/// Errors are in units in the last place of `dtype` at the tensor's largest value. Parameters are
/// the whole layer's initial ones with vectors shaken a little (so that a norm's weights are not
/// all one), cut for each rank; gradients of copies must be those of the whole on every rank that
/// holds one. Collective. Raises c10::Error where the layers do not fit together: other parameter
/// names, shapes that are not the cut of the whole's.
LayerReport check_layer(const LayerCheck& check, const std::shared_ptr<Communicator>& comm);

}  // namespace syncnorm
