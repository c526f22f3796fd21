#pragma once

#include <cstdint>
#include <memory>

#include "syncnorm/communicator.h"

namespace language_model {

/// The ranks of a job as a grid: a row is a tensor group, whose ranks hold the shards of one model
/// and see the same windows; a column is a data group, whose ranks hold the same shard and see
/// different windows.
struct Grid {
  std::shared_ptr<syncnorm::Communicator> world, tensor, data;

  /// Tensor groups of `tensor_parallel` consecutive ranks, which divides their number (0: all in
  /// one), since those are most likely on one node. Collective.
  Grid(std::shared_ptr<syncnorm::Communicator> all, int64_t tensor_parallel);

  /// The part [first, first + count) of `total` windows that this rank's tensor group takes.
  struct Share {
    int64_t first, count;
  };
  Share share(int64_t total) const;

  /// One rank of each tensor group: what all of a group know is counted once.
  bool speaks_for_group() const { return tensor->rank() == 0; }
};

}  // namespace language_model
