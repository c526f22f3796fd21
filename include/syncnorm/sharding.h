#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "syncnorm/communicator.h"

namespace syncnorm {

/// Positions [offset, offset + size) along one dimension of a whole tensor.
struct Range {
  int64_t offset = 0;
  int64_t size = 0;
};

/// Sizes of `parts` shards of `total`: the first total % parts are one larger.
std::vector<int64_t> balanced_shards(int64_t total, int parts);

/// Which parts of a whole tensor each rank of a group holds.
///
/// A shard is the whole tensor's `ranges` of its rank along `dim`, one after the other. Ranges of
/// different ranks may overlap: the ranks then hold copies of the same values, and each must see
/// their whole gradient. A default-made Sharding is a tensor that every rank holds whole.
struct Sharding {
  std::shared_ptr<Communicator> comm;      ///< null: replicated
  int64_t dim = 0;                         ///< cut along this dimension
  int64_t extent = 0;                      ///< size of the whole along it
  std::vector<std::vector<Range>> ranges;  ///< by rank

  /// Consecutive shards of these sizes, one for each rank of `comm`.
  static Sharding consecutive(std::shared_ptr<Communicator> comm, int64_t dim,
                              const std::vector<int64_t>& sizes);

  bool replicated() const { return comm == nullptr; }
  /// Size along `dim` of rank `rank`'s shard.
  int64_t local_size(int rank) const;
  /// Shape of the whole, from the shape of a shard.
  std::vector<int64_t> whole_shape(at::IntArrayRef shard_shape) const;
  /// This rank's shard of `whole`, a copy where it is a part. Raises c10::Error where `whole` has
  /// another extent.
  torch::Tensor shard_of(const torch::Tensor& whole) const;
  /// How many ranks hold each position of this rank's shard: double [local size].
  torch::Tensor copies() const;
  /// Positions of the whole that more than one rank holds, in order, none twice.
  std::vector<Range> shared_ranges() const;
};

/// A module some of whose own parameters or buffers are shards. Those it does not say are sharded
/// are replicated: the same on every rank, and so is their gradient.
class ParallelModule {
 public:
  virtual ~ParallelModule() = default;
  /// `name` is the module's own name of a parameter or buffer, "weight" for instance.
  virtual Sharding sharding_of(const std::string& name) const = 0;
};

/// A tensor of a module tree, or belonging to one (an optimizer's moments), with how it is cut.
struct ShardedTensor {
  std::string name;
  torch::Tensor tensor;
  Sharding sharding;
};

/// All parameters of the tree with their path and sharding; with `buffers` those too.
std::vector<ShardedTensor> sharded_tensors(const torch::nn::Module& module, bool buffers = true);

}  // namespace syncnorm
