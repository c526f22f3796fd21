#pragma once

#include <cstdint>
#include <vector>

namespace syncnorm {

/// Cuts each global batch of an epoch into balanced shards, so that every rank takes the same
/// number of steps and no sample is repeated or dropped: ranks cannot run out early. Shards differ
/// by at most one sample; in a last, short batch some may be empty.
///
/// With unequal shards the average of local means is not the mean of the batch. Scale each rank's
/// summed loss by `size / global_size` (size: ranks) before backward, and data parallelism's
/// average is the gradient of the global mean.
class DistributedBatchSampler {
 public:
  struct Batch {
    std::vector<int64_t> indices;  ///< this rank's samples
    int64_t global_size = 0;       ///< samples of all ranks in this step
  };

  /// `dataset_size` samples, `global_batch` of them a step over `size` ranks. The same arguments on
  /// every rank.
  DistributedBatchSampler(int64_t dataset_size, int64_t global_batch, int rank, int size,
                          bool shuffle = true, uint64_t seed = 0, bool drop_last = false);

  /// Restarts at the first step of `epoch`; the order depends on (seed, epoch) alone, not on the
  /// number of ranks.
  void set_epoch(int64_t epoch);
  /// Steps in an epoch.
  int64_t steps() const;
  /// Batch of step `step` of the current epoch.
  Batch batch(int64_t step) const;

 private:
  std::vector<int64_t> order_;
  int64_t global_batch_;
  int rank_;
  int size_;
  bool shuffle_;
  uint64_t seed_;
  bool drop_last_;
};

}  // namespace syncnorm
