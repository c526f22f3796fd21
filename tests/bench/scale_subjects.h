#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "syncnorm/collectives.h"
#include "syncnorm/sync_batch_norm.h"
#include "syncnorm/tensor_parallel_norm.h"

namespace syncnorm::bench {

/// A norm over a communicator; `step` is one forward and backward, whose input's gradient it
/// returns.
struct Subject {
  std::string name;
  std::function<torch::Tensor()> step;
};

/// Per-rank sizes of the subjects: input [images, channels, side, side] and [rows, columns].
struct Extents {
  int64_t images = 2;
  int64_t channels = 64;
  int64_t side = 7;
  int64_t rows = 64;
  int64_t columns = 64;
};

/// Batch norm of [N, C, H, W] as it is written by hand: means and mean squares averaged over ranks
/// by one all-reduce each, each with one in backward.
inline torch::Tensor batch_norm_by_hand(const torch::Tensor& x,
                                        const std::shared_ptr<Communicator>& comm) {
  const auto average = [&](const torch::Tensor& mine, const char* name) {
    return copy_to_ranks(reduce_from_ranks(mine, comm, name), comm, name) / comm->size();
  };
  const auto mean = average(x.mean({0, 2, 3}, true), "by_hand.mean");
  const auto square = average(x.square().mean({0, 2, 3}, true), "by_hand.square");
  return (x - mean) * (square - mean.square() + 1e-5).rsqrt();
}

template <typename Norm>
Subject subject_of(std::string name, Norm norm, const torch::Tensor& x) {
  const auto input = x.clone().set_requires_grad(true);
  const auto gradient = torch::randn_like(x);
  return {std::move(name), [norm, input, gradient]() mutable {
            input.mutable_grad() = torch::Tensor();
            norm(input).backward(gradient);
            return input.grad();
          }};
}

inline torch::Tensor random_images(const Extents& size) {
  return torch::randn({size.images, size.channels, size.side, size.side});
}

inline std::vector<Subject> norms_over(const std::shared_ptr<Communicator>& comm,
                                       const Extents& size) {
  const auto rows = torch::randn({size.rows, size.columns});
  const int64_t hidden = size.columns * comm->size();
  const auto name = [&](const char* kind) { return std::string(kind) + " over " + comm->name(); };
  return {subject_of("SyncBatchNorm",
                     SyncBatchNorm(SyncBatchNormOptions(size.channels)
                                       .affine(false)
                                       .communicator(comm)
                                       .name(name("batch"))),
                     random_images(size)),
          subject_of("TensorParallelLayerNorm",
                     TensorParallelLayerNorm(TensorParallelLayerNormOptions(hidden)
                                                 .elementwise_affine(false)
                                                 .communicator(comm)
                                                 .name(name("layer"))),
                     rows),
          subject_of("TensorParallelRMSNorm",
                     TensorParallelRMSNorm(TensorParallelRMSNormOptions(hidden)
                                               .elementwise_affine(false)
                                               .communicator(comm)
                                               .name(name("rms"))),
                     rows)};
}

inline Subject batch_norm_by_hand_over(const std::shared_ptr<Communicator>& comm,
                                       const Extents& size) {
  return subject_of(
      "batch norm by hand", [comm](const torch::Tensor& x) { return batch_norm_by_hand(x, comm); },
      random_images(size));
}

/// The norms, and batch norm by hand last.
inline std::vector<Subject> subjects_over(const std::shared_ptr<Communicator>& comm,
                                          const Extents& size) {
  auto subjects = norms_over(comm, size);
  subjects.push_back(batch_norm_by_hand_over(comm, size));
  return subjects;
}

}  // namespace syncnorm::bench
