#pragma once

#include "support/batch.h"
#include "support/tolerance.h"
#include "support/world.h"
#include "syncnorm/sync_batch_norm.h"

/// SyncBatchNorm with residual and ReLU on a device against batch norm, sum and ReLU in double on
/// the gathered batch on the CPU.
namespace syncnorm::testing::fused_batch_norm {

/// How the residual lies in memory.
enum class Strides { as_input, other_format, gaps };

struct Trial {
  std::vector<int64_t> shape{9, 5, 3, 4};
  torch::ScalarType dtype = torch::kFloat;
  torch::ScalarType parameter_dtype = torch::kFloat;
  torch::MemoryFormat format = torch::MemoryFormat::Contiguous;
  bool residual = true, relu = true;
  Strides strides = Strides::as_input;
  torch::Device device = torch::kCPU;
};

/// Sums of a hundred terms in another order in double.
inline double tolerance(torch::ScalarType dtype) { return norm_tolerance(dtype, 1e-12); }

/// The gathered batch, what torch makes of it in double, and this rank's part.
struct Batch {
  Batch(const Trial& t, const std::shared_ptr<Communicator>& comm, uint64_t seed) : trial(t) {
    std::mt19937 generator(seed);
    shards = random_shards(t.shape[0], comm->size(), generator);
    rank = comm->rank();
    torch::manual_seed(seed);
    const auto draw = [&](at::IntArrayRef shape, torch::ScalarType type) {
      return torch::randn(shape, torch::kDouble).to(type);
    };
    x = (draw(t.shape, torch::kDouble) * 2 + 1).to(t.dtype).contiguous(t.format);
    residual = draw(t.shape, t.dtype);
    dy = draw(t.shape, t.dtype);
    weight = draw({t.shape[1]}, t.parameter_dtype);
    bias = draw({t.shape[1]}, t.parameter_dtype);
    for (auto* values : {&x, &residual, &weight, &bias})
      whole.push_back(values->to(torch::kDouble).contiguous().clone().set_requires_grad(true));
    const auto sum = composed();
    // So near the ReLU's bend rounding decides what passes: such elements get no gradient.
    if (t.relu) dy.masked_fill_(sum.abs() < 0.1, 0);
    y = rectified(sum);
    y.backward(dy.to(torch::kDouble));
  }

  /// On the gathered batch, before the ReLU.
  torch::Tensor composed() const {
    const auto y = torch::batch_norm(whole[0], whole[2], whole[3], {}, {}, true, 0, 1e-5, false);
    return trial.residual ? y + whole[1] : y;
  }
  torch::Tensor rectified(const torch::Tensor& sum) const { return trial.relu ? sum.relu() : sum; }

  torch::Tensor mine(const torch::Tensor& values) const {
    return shard_of(values, shards, rank).to(trial.device);
  }
  torch::Tensor my_residual() const {
    const auto part = mine(residual);
    switch (trial.strides) {
      case Strides::as_input:
        return part.clone(trial.format);
      case Strides::other_format:
        return part.clone(trial.format == torch::MemoryFormat::Contiguous
                              ? torch::MemoryFormat::ChannelsLast
                              : torch::MemoryFormat::Contiguous);
      default:
        return torch::stack({part, part}, -1).select(-1, 1);
    }
  }
  SyncBatchNorm module(const std::shared_ptr<Communicator>& comm) const {
    SyncBatchNorm norm(
        SyncBatchNormOptions(trial.shape[1]).relu(trial.relu).communicator(comm).name("fused"));
    norm->to(trial.device, trial.parameter_dtype);
    const torch::NoGradGuard no_grad;
    norm->weight.copy_(weight);
    norm->bias.copy_(bias);
    return norm;
  }
  void check_parameters(SyncBatchNorm& norm, Communicator& comm) const {
    auto dweight = norm->weight.grad().to(torch::kDouble);
    auto dbias = norm->bias.grad().to(torch::kDouble);
    comm.all_reduce(dweight);
    comm.all_reduce(dbias);
    // Each rank's part is rounded to the parameters' dtype once.
    const double near = tolerance(trial.parameter_dtype) * comm.size();
    EXPECT_LT(relative_difference(dweight.cpu(), whole[2].grad()), near);
    EXPECT_LT(relative_difference(dbias.cpu(), whole[3].grad()), near);
  }

  Trial trial;
  std::vector<int64_t> shards;
  int rank = 0;
  torch::Tensor x, residual, dy, weight, bias;
  std::vector<torch::Tensor> whole;  // x, residual, weight, bias as leaves in double
  torch::Tensor y;
};

inline void run(const Trial& trial, const std::shared_ptr<Communicator>& comm, uint64_t seed) {
  const Batch batch(trial, comm, seed);
  auto norm = batch.module(comm);
  auto x = batch.mine(batch.x).set_requires_grad(true);
  auto residual =
      trial.residual ? batch.my_residual().detach().set_requires_grad(true) : torch::Tensor();
  comm->reset_counters();
  const auto y = norm->forward(x, residual);
  EXPECT_EQ(comm->counters().collectives(), 1 + comm->counters().second_exchanges);
  y.backward(batch.mine(batch.dy));
  EXPECT_EQ(comm->counters().collectives(), 2 + comm->counters().second_exchanges);

  const double near = tolerance(trial.dtype);
  EXPECT_EQ(y.scalar_type(), trial.dtype);
  EXPECT_TRUE(x.numel() == 0 || y.suggest_memory_format() == x.suggest_memory_format());
  EXPECT_LT(relative_difference(y, batch.mine(batch.y)), near);
  EXPECT_LT(relative_difference(x.grad(), batch.mine(batch.whole[0].grad())), near);
  if (trial.residual) {
    EXPECT_LT(relative_difference(residual.grad(), batch.mine(batch.whole[1].grad())), near);
    EXPECT_EQ(residual.grad().scalar_type(), trial.dtype);
  }
  batch.check_parameters(norm, *comm);
}

/// Every form, dtype, memory format and way for a residual to lie.
inline void run_all(const std::shared_ptr<Communicator>& comm, torch::Device device) {
  uint64_t seed = 0;
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf})
    for (const auto format : {torch::MemoryFormat::Contiguous, torch::MemoryFormat::ChannelsLast})
      for (const int form : {0, 1, 2})
        for (const auto strides : {Strides::as_input, Strides::other_format, Strides::gaps}) {
          Trial trial;
          trial.device = device;
          trial.dtype = dtype;
          trial.format = format;
          trial.relu = form != 0;
          trial.residual = form != 1;
          trial.strides = strides;
          if (!trial.residual && strides != Strides::as_input) continue;
          const bool half = dtype == torch::kBFloat16 || dtype == torch::kHalf;
          trial.parameter_dtype = half && seed % 2 == 0 ? torch::kFloat : dtype;
          // Widths below, at and beyond a vector; more channels than one.
          if (seed % 3 == 1) trial.shape = {6, 19, 4, 4};
          if (seed % 3 == 2) trial.shape = {7, 33, 1, 1};
          SCOPED_TRACE(::testing::Message() << dtype << ' ' << format << " form " << form
                                            << " strides " << int(strides));
          run(trial, comm, ++seed);
        }
}

}  // namespace syncnorm::testing::fused_batch_norm
