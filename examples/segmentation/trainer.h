#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>

#include "augment.h"
#include "checkpoint.h"
#include "common/device.h"
#include "evaluate.h"
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
  Trainer(const Recipe& recipe, const Dataset& dataset, const job::Placement& placement);

  /// Goes on from `position` to the end of its epoch (position is then the start of the next),
  /// calling `watch` after each step, or to the step before which some rank was asked to stop.
  /// Collective. Raises job::Failure on all ranks where the loss is no longer a number.
  void train_epoch(Position& position, const std::function<void(const StepReport&)>& watch);

  /// Some rank was asked to stop; the same on all ranks.
  bool stopping() const { return stopping_; }

  /// Scores over the held-out pictures. Collective.
  Scores test();

  /// Classes of the pictures `indices`, as segmentation::predict gives them, in the recipe's
  /// precision.
  torch::Tensor predict(const std::vector<int64_t>& indices);

  /// Where all ranks have come to the same state, e.g. before rank 0 saves. Running statistics of
  /// --norm batch differ from rank to rank; rank 0's are taken, as is the custom. Collective.
  void share_buffers();

  UNet& net() { return parallel_.module(); }
  torch::optim::Optimizer& optimizer() { return *optimizer_; }

 private:
  /// What a step is about: this rank's pictures, on the device, and how many all ranks have.
  struct Work {
    Batch batch;
    int64_t global_size;
  };
  Work prepare(int64_t epoch, int64_t step);

  /// Returns the summed loss of this rank's pictures, which a GPU may still be computing.
  torch::Tensor step(const Work& work);

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
