// norm(x, residual) of split rows: the sum bit for bit as torch adds it, the norm of that sum, and
// the gradients that meet in it, against torch in double on whole rows.
#include <gtest/gtest.h>

#include "support/residual_norm_trial.h"
#include "syncnorm/tensor_parallel_norm.h"

namespace syncnorm {
namespace {

using testing::columns_of;
using testing::message_of;
using testing::new_world;
using testing::relative_difference;
using testing::residual_norm::Norm;
using testing::residual_norm::run;
using testing::residual_norm::run_all;
using testing::residual_norm::Trial;
using testing::residual_norm::Uses;

TEST(TensorParallelNormResidual, EqualsSumAndNormOfWholeRows) { run_all(new_world(), torch::kCPU); }

TEST(TensorParallelNormResidual, FrozenStreamCostsNoBackwardCollective) {
  if (!testing::host_waits()) GTEST_SKIP() << "backward communicates in any case";
  const auto comm = new_world();
  for (const bool layer : {true, false}) {
    Trial trial;
    trial.layer = layer;
    trial.uses = Uses::norm;
    trial.x_needs = trial.residual_needs = false;
    run(trial, comm, 300);
  }
}

/// Rounding, halves of two to the power of minus 24 and infinity among them.
TEST(TensorParallelNormResidual, TheSumIsTorchsBitForBit) {
  const auto comm = new_world();
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    torch::manual_seed(9);
    const auto shards = balanced_shards(37, comm->size());
    const auto scale = torch::pow(2.0, torch::randint(-30, 18, {200, 37}).to(torch::kDouble));
    const auto x = columns_of((torch::randn({200, 37}) * scale).to(dtype), shards, comm->rank());
    const auto residual =
        columns_of((torch::randn({200, 37}) * scale).to(dtype), shards, comm->rank());
    Trial trial;
    trial.shape = {200, 37};
    trial.dtype = dtype;
    for (const bool layer : {true, false}) {
      trial.layer = layer;
      const auto [y, sum] = Norm(trial, shards, comm)(x, residual);
      const auto expected = x + residual;
      const auto bits = [](const torch::Tensor& of) {  // NaN has many
        return torch::where(of.isnan(), torch::ones_like(of), of).view(torch::kUInt8);
      };
      EXPECT_TRUE(torch::equal(sum.isnan(), expected.isnan())) << dtype;
      EXPECT_TRUE(torch::equal(bits(sum), bits(expected))) << dtype;
    }
  }
}

TEST(TensorParallelNormResidual, CostsNothingMoreOnTheWire) {
  const auto comm = new_world();
  Trial trial;
  const auto shards = balanced_shards(29, comm->size());
  for (const bool layer : {true, false}) {
    trial.layer = layer;
    Norm norm(trial, shards, comm);
    const auto x = torch::randn({4, shards[comm->rank()]}).requires_grad_();
    comm->reset_counters();
    norm(x).sum().backward();
    const auto plain = comm->counters();
    comm->reset_counters();
    const auto [y, sum] = norm(x, torch::randn_like(x));
    (y.sum() + sum.sum()).backward();
    EXPECT_EQ(comm->counters().collectives(), plain.collectives());
    EXPECT_EQ(comm->counters().bytes, plain.bytes);
  }
}

TEST(TensorParallelNormResidual, DoubleBackward) {
  const auto comm = new_world();
  for (const bool layer : {true, false}) {
    Trial trial;
    trial.layer = layer;
    trial.dtype = torch::kDouble;
    torch::manual_seed(77);
    const auto shards = balanced_shards(29, comm->size());
    Norm norm(trial, shards, comm);
    const auto whole_x = torch::randn(trial.shape, torch::kDouble).requires_grad_();
    const auto whole_residual = torch::randn(trial.shape, torch::kDouble).requires_grad_();
    const auto second = [](const torch::Tensor& y, const torch::Tensor& sum, const torch::Tensor& x,
                           const torch::Tensor& residual) {
      const auto loss = y.pow(3).sum() + sum.square().sum();
      const auto first = torch::autograd::grad({loss}, {x, residual}, {}, true, true);
      return torch::autograd::grad({(first[0] * first[1]).sum()}, {x, residual});
    };
    const auto sum = whole_x + whole_residual;
    const auto expected = second(norm.whole(sum, norm.weight), sum, whole_x, whole_residual);
    auto x = columns_of(whole_x.detach(), shards, comm->rank()).requires_grad_();
    auto residual = columns_of(whole_residual.detach(), shards, comm->rank()).requires_grad_();
    const auto [y, own_sum] = norm(x, residual);
    const auto got = second(y, own_sum, x, residual);
    for (const size_t i : {0, 1})
      EXPECT_LT(relative_difference(got[i], columns_of(expected[i], shards, comm->rank())), 1e-10);
  }
}

TEST(TensorParallelNormResidual, ChangingTheSumBeforeBackwardIsRefused) {
  const auto comm = new_world();
  TensorParallelRMSNorm norm(TensorParallelRMSNormOptions(8).communicator(comm));
  const auto x = torch::randn({2, norm->weight.size(0)}).requires_grad_();
  const auto [y, sum] = norm(x, torch::randn_like(x));
  sum.add_(1);
  EXPECT_NE(message_of<c10::Error>([&, y = y] { y.sum().backward(); }).find("inplace"),
            std::string::npos);
}

TEST(TensorParallelNormResidual, WrongResidualsAreRefusedBeforeCommunication) {
  const auto comm = new_world();
  TensorParallelLayerNorm norm(
      TensorParallelLayerNormOptions(8).communicator(comm).name("block.norm"));
  const auto h = norm->weight.size(0);
  const auto x = torch::randn({2, h});
  for (const auto& residual : {torch::Tensor(), torch::randn({h}), torch::randn({2, 1, h}),
                               torch::randn({2, h}, torch::kDouble)}) {
    const auto message = message_of<c10::Error>([&] { norm(x, residual); });
    EXPECT_NE(message.find("block.norm: "), std::string::npos) << message;
    EXPECT_NE(message.find("residual"), std::string::npos) << message;
  }
  EXPECT_EQ(comm->counters().collectives(), 0);
}

}  // namespace
}  // namespace syncnorm
