#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>

#include "augment.h"
#include "checkpoint.h"
#include "evaluate.h"
#include "syncnorm/communicator.h"
#include "syncnorm/data_parallel.h"
#include "syncnorm/sampler.h"
#include "unet.h"

namespace segmentation {

/// What a step tells the one who watches.
struct StepReport {
  int64_t images;  ///< seen by all ranks in this epoch so far
  double loss;     ///< mean of the epoch so far
  double lr;
};

/// One network in training: a replica on each rank, gradients averaged by DistributedDataParallel.
/// The same dataset on all ranks.
class Trainer {
 public:
  Trainer(const Recipe& recipe, const Dataset& dataset,
          std::shared_ptr<syncnorm::Communicator> comm, torch::Device device);

  /// Goes on from `position` to the end of its epoch (position is then the start of the next),
  /// calling `watch` after each step, or to the step before which some rank was asked to stop.
  /// Collective. Raises job::Failure on all ranks where the loss is no longer a number.
  void train_epoch(Position& position, const std::function<void(const StepReport&)>& watch);

  /// Some rank was asked to stop; the same on all ranks.
  bool stopping() const { return stopping_; }

  /// Scores over the held-out pictures. Collective.
  Scores test();

  /// Where all ranks have come to the same state, e.g. before rank 0 saves. Running statistics of
  /// --norm batch differ from rank to rank; rank 0's are taken, as is the custom. Collective.
  void share_buffers();

  UNet& net() { return parallel_.module(); }
  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  torch::Device device() const { return device_; }

 private:
  /// Returns the summed loss of this rank's pictures.
  double step(const Batch& batch, int64_t global_size);

  const Recipe& recipe_;
  const Dataset& dataset_;
  std::shared_ptr<syncnorm::Communicator> comm_;
  torch::Device device_;
  syncnorm::DistributedBatchSampler sampler_;
  syncnorm::DistributedDataParallel<UNet> parallel_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  bool stopping_ = false;
};

}  // namespace segmentation
