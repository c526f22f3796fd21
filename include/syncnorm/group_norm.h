#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "syncnorm/communicator.h"
#include "syncnorm/named_module.h"
#include "syncnorm/sharding.h"

namespace syncnorm {

/// What of the input [N, C, ...] is split over the ranks.
enum class Split {
  channels,  ///< dimension 1; weight and bias are shards too
  space,     ///< the dimensions after it; weight and bias are whole on every rank
};

/// Options of ParallelGroupNorm.
struct ParallelGroupNormOptions {
  ParallelGroupNormOptions(int64_t num_groups, int64_t num_channels)
      : num_groups_(num_groups), num_channels_(num_channels) {}

  /// Instance normalization (Ulyanov, Vedaldi & Lempitsky 2016) without running statistics: a group
  /// for each channel, and as in torch::nn::InstanceNorm no weight and bias unless asked for.
  static ParallelGroupNormOptions instance(int64_t num_features) {
    return ParallelGroupNormOptions(num_features, num_features).affine(false);
  }

  /// Groups and channels of the whole input. Fixed at construction.
  TORCH_ARG(int64_t, num_groups);
  TORCH_ARG(int64_t, num_channels);
  /// Added to the variance. May be changed at any time, on all ranks.
  TORCH_ARG(double, eps) = 1e-5;
  /// Learnable weight and bias. Fixed at construction.
  TORCH_ARG(bool, affine) = true;
  /// Fixed at construction.
  TORCH_ARG(Split, split) = Split::channels;
  /// Channels of each rank where they are split, zero allowed; empty: balanced_shards. Fixed at
  /// construction.
  TORCH_ARG(std::vector<int64_t>, shard_sizes) = {};
  /// The ranks that hold an input; null is the living Environment's world. Fixed at construction.
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  /// Name in error messages, the same on all ranks. Empty: "ParallelGroupNorm-k".
  TORCH_ARG(std::string, name) = "";
};

/// Group normalization (Wu & He 2018) of inputs whose channels or whose space is split over ranks.
///
/// Input [N, c, ...], c this rank's channels where these are split (see shard()) and all of them
/// otherwise; N is the same on all ranks, space too unless it is what is split: then it may differ
/// and be empty. float, double, half or bfloat16. Split channels cost no collective where every
/// group lies on one rank, and one forward, one backward where a group straddles; split space
/// always costs one and one. The gradients of weight and bias are complete: those of split channels
/// need no communication, those of split space ride with the backward's collective.
///
/// Raises as TensorParallelLayerNorm does.
class ParallelGroupNormImpl : public torch::nn::Cloneable<ParallelGroupNormImpl>,
                              public NamedModule,
                              public ParallelModule {
 public:
  ParallelGroupNormImpl(int64_t num_groups, int64_t num_channels)
      : ParallelGroupNormImpl(ParallelGroupNormOptions(num_groups, num_channels)) {}
  explicit ParallelGroupNormImpl(ParallelGroupNormOptions options);

  torch::Tensor forward(const torch::Tensor& input);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  /// This rank's channels; replicated where space is split.
  const Sharding& shard() const { return shard_; }
  Sharding sharding_of(const std::string& name) const override;

  ParallelGroupNormOptions options;
  torch::Tensor weight;  ///< [c], undefined without affine
  torch::Tensor bias;

 private:
  Sharding shard_;
  std::shared_ptr<Communicator> statistics_;  // self where no group straddles
};
TORCH_MODULE(ParallelGroupNorm);

}  // namespace syncnorm
