#pragma once

#include "support/batch.h"
#include "support/tolerance.h"
#include "support/world.h"
#include "syncnorm/sync_batch_norm.h"

/// SyncBatchNorm on a device against batch norm in double on the gathered batch on the CPU.
namespace syncnorm::testing::batch_norm {

struct Trial {
  std::vector<int64_t> shape;  // of the gathered batch
  std::vector<int64_t> shards;
  torch::ScalarType dtype = torch::kDouble;
  torch::ScalarType parameter_dtype = torch::kDouble;
  bool affine = true;
  bool track = true;
  std::optional<double> momentum = 0.1;
  double offset = 0;
  torch::MemoryFormat format = torch::MemoryFormat::Contiguous;
  torch::MemoryFormat gradient_format = torch::MemoryFormat::Contiguous;
  torch::Device device = torch::kCPU;
};

/// Double: both sides round like double sums of a few thousand terms.
inline double tolerance(torch::ScalarType dtype) { return norm_tolerance(dtype, 1e-11); }

struct Reference {
  torch::Tensor y, dx, dweight, dbias, running_mean, running_var;
};

/// One process, double, plain batch norm in ATen, two steps on the same batch.
inline Reference reference_of(const torch::Tensor& x, const torch::Tensor& dy,
                              const torch::Tensor& weight, const torch::Tensor& bias,
                              const Trial& trial) {
  Reference r;
  const auto channels = x.size(1);
  r.running_mean = torch::zeros({channels}, torch::kDouble);
  r.running_var = torch::ones({channels}, torch::kDouble);
  for (int step = 0; step < 2; ++step) {
    auto input = x.to(torch::kDouble).contiguous().clone().set_requires_grad(true);
    auto w = weight.to(torch::kDouble).clone().set_requires_grad(true);
    auto b = bias.to(torch::kDouble).clone().set_requires_grad(true);
    const double momentum = trial.momentum.value_or(1.0 / (step + 1));
    r.y =
        torch::batch_norm(input, w, b, r.running_mean, r.running_var, true, momentum, 1e-5, false);
    r.y.backward(dy.to(torch::kDouble).contiguous());
    r.dx = input.grad();
    r.dweight = w.grad();
    r.dbias = b.grad();
  }
  return r;
}

inline void run(const Trial& trial, const std::shared_ptr<Communicator>& comm, uint64_t seed) {
  torch::manual_seed(seed);
  const auto channels = trial.shape[1];
  const auto whole_x = (torch::randn(trial.shape, torch::kDouble) + trial.offset)
                           .to(trial.dtype)
                           .contiguous(trial.format);
  const auto whole_dy = torch::randn(trial.shape, torch::kDouble).to(trial.dtype);
  auto weight = torch::ones({channels}, torch::kDouble);
  auto bias = torch::zeros({channels}, torch::kDouble);
  if (trial.affine) {
    weight = (torch::rand({channels}, torch::kDouble) + 0.5).to(trial.parameter_dtype);
    bias = torch::randn({channels}, torch::kDouble).to(trial.parameter_dtype);
  }
  const auto expected = reference_of(whole_x, whole_dy, weight, bias, trial);

  SyncBatchNorm module(SyncBatchNormOptions(channels)
                           .affine(trial.affine)
                           .track_running_stats(trial.track)
                           .momentum(trial.momentum)
                           .communicator(comm));
  module->to(trial.device, trial.parameter_dtype);
  if (trial.affine) {
    const torch::NoGradGuard no_grad;
    module->weight.copy_(weight);
    module->bias.copy_(bias);
  }
  const auto dy = shard_of(whole_dy.contiguous(trial.gradient_format), trial.shards, comm->rank())
                      .to(trial.device);
  torch::Tensor x, y;
  for (int step = 0; step < 2; ++step) {
    module->zero_grad();
    x = shard_of(whole_x, trial.shards, comm->rank()).to(trial.device).set_requires_grad(true);
    comm->reset_counters();
    y = module->forward(x);
    EXPECT_EQ(comm->counters().all_reduce, 1 + comm->counters().second_exchanges);
    y.backward(dy);
    EXPECT_EQ(comm->counters().collectives(), 2 + comm->counters().second_exchanges);
  }

  const double near = tolerance(trial.dtype);
  EXPECT_EQ(y.scalar_type(), trial.dtype);
  EXPECT_EQ(y.sizes(), x.sizes());
  EXPECT_EQ(x.grad().scalar_type(), trial.dtype);
  EXPECT_TRUE(x.numel() == 0 || y.suggest_memory_format() == x.suggest_memory_format());
  EXPECT_LT(relative_difference(y.cpu(), shard_of(expected.y, trial.shards, comm->rank())), near);
  EXPECT_LT(relative_difference(x.grad().cpu(), shard_of(expected.dx, trial.shards, comm->rank())),
            near);
  if (trial.affine) {
    auto dweight = module->weight.grad().to(torch::kDouble);
    auto dbias = module->bias.grad().to(torch::kDouble);
    comm->all_reduce(dweight);
    comm->all_reduce(dbias);
    // Each rank's part was rounded to the parameters' dtype once, and terms of mixed sign add up to
    // less than they are.
    const double sums_near = tolerance(trial.parameter_dtype) * (1 + comm->size());
    EXPECT_LT(relative_difference(dweight.cpu(), expected.dweight), sums_near);
    EXPECT_LT(relative_difference(dbias.cpu(), expected.dbias), sums_near);
  }
  if (trial.track) {
    // Two steps, rounded to the buffers' dtype once each.
    const double buffers_near = 2 * tolerance(module->running_mean.scalar_type());
    EXPECT_LT(relative_difference(module->running_mean.cpu(), expected.running_mean), buffers_near);
    EXPECT_LT(relative_difference(module->running_var.cpu(), expected.running_var), buffers_near);
    EXPECT_TRUE(bit_equal_across(*comm, module->running_mean));
    EXPECT_TRUE(bit_equal_across(*comm, module->running_var));
    EXPECT_EQ(module->num_batches_tracked.item<int64_t>(), 2);
  }
}

inline Trial random_trial(std::mt19937& generator, int ranks) {
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(generator);
  };
  Trial trial;
  const auto dims = draw(2, 5);
  trial.shape = {draw(2, 9), std::vector<int64_t>{1, 2, 3, 7, 16, 65, 130}[draw(0, 6)]};
  while (static_cast<int64_t>(trial.shape.size()) < dims) trial.shape.push_back(draw(1, 7));
  trial.shards = random_shards(trial.shape[0], ranks, generator);
  constexpr torch::ScalarType kTypes[] = {torch::kDouble, torch::kFloat, torch::kHalf,
                                          torch::kBFloat16};
  trial.dtype = kTypes[draw(0, 3)];
  const bool half = trial.dtype == torch::kHalf || trial.dtype == torch::kBFloat16;
  trial.parameter_dtype = half && draw(0, 1) == 1 ? torch::kFloat : trial.dtype;
  trial.affine = draw(0, 3) > 0;
  trial.track = draw(0, 3) > 0;
  if (draw(0, 3) == 0) trial.momentum = std::nullopt;
  const auto channels_last = dims == 4   ? torch::MemoryFormat::ChannelsLast
                             : dims == 5 ? torch::MemoryFormat::ChannelsLast3d
                                         : torch::MemoryFormat::Contiguous;
  if (draw(0, 1) == 1) trial.format = channels_last;
  if (draw(0, 1) == 1) trial.gradient_format = channels_last;
  if (!half) trial.offset = static_cast<double>(draw(0, 2));
  return trial;
}

}  // namespace syncnorm::testing::batch_norm
