// SyncBatchNorm with residual and ReLU in its own passes against torch's batch norm, sum and ReLU
// in double on the gathered batch.
#include <gtest/gtest.h>

#include "support/fused_batch_norm_trial.h"
#include "syncnorm/convert.h"
#include "syncnorm/sync_batch_norm.h"

namespace syncnorm {
namespace {

using testing::message_of;
using testing::new_world;
using testing::relative_difference;
using testing::fused_batch_norm::Batch;
using testing::fused_batch_norm::run;
using testing::fused_batch_norm::run_all;
using testing::fused_batch_norm::tolerance;
using testing::fused_batch_norm::Trial;

TEST(SyncBatchNormFused, EqualsNormSumAndReluOnTheGatheredBatch) {
  run_all(new_world(), torch::kCPU);
}

TEST(SyncBatchNormFused, TakesEveryNumberOfDimensions) {
  const auto comm = new_world();
  for (const auto& shape : std::vector<std::vector<int64_t>>{
           {11, 3}, {5, 4, 7}, {3, 2, 3, 2, 5}, {4, 1, 6, 6}, {2, 70, 2, 2}, {1, 3, 40, 40}}) {
    Trial trial;
    trial.shape = shape;
    SCOPED_TRACE(::testing::Message() << shape);
    run(trial, comm, 100 + shape.size());
  }
}

/// Whoever needs a gradient gets the right one, whatever others need, with one collective where
/// some rank's input needs one, and none otherwise, if the host knows.
TEST(SyncBatchNormFused, GradientsOfSomeTensorsOnSomeRanks) {
  const auto comm = new_world();
  for (const auto format : {torch::MemoryFormat::Contiguous, torch::MemoryFormat::ChannelsLast})
    for (const bool relu : {true, false})
      for (int needs = 0; needs < 16; ++needs) {
        SCOPED_TRACE(::testing::Message() << format << " relu " << relu << " needs " << needs);
        Trial trial;
        trial.format = format;
        trial.relu = relu;
        const Batch batch(trial, comm, 7 + needs);
        auto norm = batch.module(comm);
        // Bits: residual; input of the even ranks, of the odd ones; parameters.
        const bool x_needs = (needs >> (1 + comm->rank() % 2) & 1) != 0;
        const bool some_need =
            (needs & 2) != 0 || ((needs & 4) != 0 && comm->size() > 1) || !testing::host_waits();
        const bool affine = (needs & 8) != 0;
        norm->weight.set_requires_grad(affine);
        norm->bias.set_requires_grad(affine);
        auto x = batch.mine(batch.x).set_requires_grad(x_needs);
        auto residual = batch.my_residual().set_requires_grad((needs & 1) != 0);
        const auto y = norm->forward(x, residual);
        EXPECT_EQ(y.requires_grad(), needs % 2 == 1 || affine || some_need);
        if (!y.requires_grad()) continue;
        comm->reset_counters();
        y.backward(batch.mine(batch.dy));
        EXPECT_EQ(comm->counters().collectives(), some_need ? 1 : 0);
        const double near = tolerance(trial.dtype);
        EXPECT_EQ(x.grad().defined(), x_needs);
        EXPECT_EQ(residual.grad().defined(), needs % 2 == 1);
        const auto check = [&](const torch::Tensor& of, const torch::Tensor& whole) {
          if (!of.requires_grad()) return;
          EXPECT_LT(relative_difference(of.grad(), batch.mine(whole.grad())), near);
        };
        check(x, batch.whole[0]);
        check(residual, batch.whole[1]);
        if (affine) batch.check_parameters(norm, *comm);
      }
}

TEST(SyncBatchNormFused, FunctionalFormIsTheModule) {
  const auto comm = new_world();
  const Batch batch(Trial(), comm, 21);
  auto norm = batch.module(comm);
  const auto x = batch.mine(batch.x), residual = batch.my_residual();
  const auto mean = torch::zeros({5}), var = torch::ones({5});
  auto options = functional::SyncBatchNormFuncOptions()
                     .weight(norm->weight)
                     .bias(norm->bias)
                     .residual(residual)
                     .relu(true)
                     .training(true)
                     .communicator(comm);
  EXPECT_TRUE(
      torch::equal(functional::sync_batch_norm(x, mean, var, options), norm->forward(x, residual)));
  EXPECT_TRUE(torch::equal(mean, norm->running_mean));
  norm->eval();
  EXPECT_TRUE(torch::equal(functional::sync_batch_norm(x, mean, var, options.training(false)),
                           norm->forward(x, residual)));
}

TEST(SyncBatchNormFused, EvaluationAddsAndRectifiesWithoutCommunication) {
  const auto comm = new_world();
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    Trial trial;
    trial.dtype = trial.parameter_dtype = dtype;
    const Batch batch(trial, comm, 31);
    auto norm = batch.module(comm);
    norm->forward(batch.mine(batch.x), batch.my_residual());
    norm->eval();
    comm->reset_counters();
    auto x = batch.mine(batch.x).set_requires_grad(true);
    auto residual = batch.my_residual().set_requires_grad(true);
    const auto y = norm->forward(x, residual);
    const auto in_double = [](const torch::Tensor& values) { return values.to(torch::kDouble); };
    const auto sum = torch::batch_norm(in_double(x), in_double(norm->weight), in_double(norm->bias),
                                       in_double(norm->running_mean), in_double(norm->running_var),
                                       false, 0, 1e-5, false) +
                     in_double(residual);
    // The norm is rounded before the residual is added.
    EXPECT_LT(relative_difference(y, sum.relu()), 2 * tolerance(dtype));
    y.sum().backward();
    EXPECT_TRUE(torch::equal(residual.grad(), (y > 0).to(dtype)));
    EXPECT_EQ(comm->counters().collectives(), 0);
  }
}

TEST(SyncBatchNormFused, DoubleBackward) {
  const auto comm = new_world();
  for (const bool relu : {true, false})
    for (const bool with_residual : {true, false}) {
      SCOPED_TRACE(::testing::Message() << relu << with_residual);
      Trial trial;
      trial.dtype = trial.parameter_dtype = torch::kDouble;
      trial.relu = relu;
      trial.residual = with_residual;
      const Batch batch(trial, comm, 41);
      const auto factor = torch::randn(trial.shape, torch::kDouble);
      /// Gradients of sum(dx*factor + dresidual*factor^2 + y^2).
      const auto second = [&](const torch::Tensor& y, const torch::Tensor& x,
                              const torch::Tensor& residual, const torch::Tensor& weight,
                              const torch::Tensor& dy, const torch::Tensor& by) {
        std::vector<torch::Tensor> inputs{x};
        if (with_residual) inputs.push_back(residual);
        const auto first = torch::autograd::grad({y}, inputs, {dy}, true, true);
        auto loss = (first[0] * by).sum() + y.square().sum();
        if (with_residual) loss = loss + (first[1] * by.square()).sum();
        inputs.push_back(weight);
        inputs.push_back(dy);
        return torch::autograd::grad({loss}, inputs);
      };
      const auto whole_dy = batch.dy.clone().set_requires_grad(true);
      const auto expected = second(batch.rectified(batch.composed()), batch.whole[0],
                                   batch.whole[1], batch.whole[2], whole_dy, factor);
      auto norm = batch.module(comm);
      auto x = batch.mine(batch.x).set_requires_grad(true);
      auto residual = batch.my_residual().set_requires_grad(true);
      const auto y = norm->forward(x, with_residual ? residual : torch::Tensor());
      auto got = second(y, x, residual, norm->weight, batch.mine(batch.dy).set_requires_grad(true),
                        batch.mine(factor));
      const size_t weight = got.size() - 2;
      comm->all_reduce(got[weight]);
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_LT(relative_difference(got[i], i == weight ? expected[i] : batch.mine(expected[i])),
                  1e-10)
            << i;
    }
}

/// As torch::relu does, in the output and in what the gradient passes; other channels are clean.
TEST(SyncBatchNormFused, NanPassesTheRelu) {
  const auto comm = new_world();
  for (const auto format : {torch::MemoryFormat::Contiguous, torch::MemoryFormat::ChannelsLast})
    for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf}) {
      SCOPED_TRACE(::testing::Message() << format << dtype);
      const auto nan = std::numeric_limits<double>::quiet_NaN();
      torch::manual_seed(51);
      auto x = torch::randn({2, 19, 3, 3}).to(dtype).contiguous(format);
      auto residual = torch::randn({2, 19, 3, 3}).to(dtype).contiguous(format);
      residual[1][2][0][1] = nan;
      if (comm->rank() == comm->size() - 1) x[0][17][2][2] = nan;
      residual.set_requires_grad(true);
      SyncBatchNorm norm(SyncBatchNormOptions(19).relu(true).communicator(comm));
      norm->to(dtype);
      const auto y = norm->forward(x, residual);
      auto expected = torch::zeros_like(y, torch::kBool);
      expected[1][2][0][1] = true;
      expected.select(1, 17).fill_(true);
      EXPECT_TRUE(torch::equal(y.isnan(), expected));
      EXPECT_TRUE(
          torch::equal(norm->forward(x).isnan(),
                       torch::where(residual.isnan(), torch::zeros_like(expected), expected)));
      y.backward(torch::ones_like(y));
      EXPECT_TRUE(torch::equal(residual.grad(), (~(y <= 0)).to(dtype)));
    }
}

TEST(SyncBatchNormFused, CostsNothingMoreOnTheWire) {
  const auto comm = new_world();
  const auto bytes = [&](bool relu, const torch::Tensor& residual) {
    SyncBatchNorm norm(SyncBatchNormOptions(6).relu(relu).communicator(comm));
    comm->reset_counters();
    norm->forward(torch::randn({2, 6, 4, 4}).set_requires_grad(true), residual).sum().backward();
    EXPECT_EQ(comm->counters().collectives(), 2);
    return comm->counters().bytes;
  };
  const auto plain = bytes(false, {});
  EXPECT_EQ(bytes(true, {}), plain);
  EXPECT_EQ(bytes(true, torch::randn({2, 6, 4, 4}).set_requires_grad(true)), plain);
}

/// What the first call leaves behind must not be of its mode. Meant for a process of its own.
TEST(SyncBatchNormFused, TrainsAfterAFirstCallInInferenceMode) {
  const auto comm = new_world();
  SyncBatchNorm norm(SyncBatchNormOptions(3).affine(false).relu(true).communicator(comm));
  {
    const c10::InferenceMode guard;
    norm->forward(torch::randn({2, 3, 4, 4}));
  }
  auto x = torch::randn({2, 3, 4, 4}).set_requires_grad(true);
  norm->forward(x).square().sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(SyncBatchNormFused, OutputsThatBackwardReadsAreGuarded) {
  const auto comm = new_world();
  SyncBatchNorm norm(SyncBatchNormOptions(3).relu(true).communicator(comm));
  const auto x = torch::randn({2, 3, 4, 4}).set_requires_grad(true);
  const auto y = norm->forward(x, torch::randn({2, 3, 4, 4}));
  y.add_(1);
  EXPECT_NE(message_of<c10::Error>([&] { y.sum().backward(); }).find("inplace"), std::string::npos);
  // Without a residual the ReLU's input is known from x.
  const auto free = norm->forward(x);
  free.mul_(2);
  free.sum().backward();
}

TEST(SyncBatchNormFused, InSequentialAndCloned) {
  const auto comm = new_world();
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 3)),
                            SyncBatchNorm(SyncBatchNormOptions(4).relu(true).communicator(comm)));
  const auto x = torch::randn({2, 2, 5, 5});
  const auto y = net->forward(x);
  EXPECT_GE(y.min().item<float>(), 0);
  EXPECT_GT((y == 0).sum().item<int64_t>(), 0);
  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->clone());
  EXPECT_TRUE(torch::equal(copy->forward(x), net->forward(x)));
}

TEST(SyncBatchNormFused, RevertRefusesToLoseTheRelu) {
  torch::nn::Sequential net(
      SyncBatchNorm(SyncBatchNormOptions(4).relu(true).communicator(self_communicator())));
  EXPECT_NE(message_of<c10::Error>([&] { revert_sync_batchnorm(net.ptr()); }).find("ReLU"),
            std::string::npos);
  EXPECT_NE(net[0]->as<SyncBatchNormImpl>(), nullptr);
}

TEST(SyncBatchNormFused, WrongResidualsAreRefusedBeforeCommunication) {
  const auto comm = new_world();
  SyncBatchNorm norm(SyncBatchNormOptions(3).communicator(comm).name("block.norm"));
  const auto x = torch::randn({2, 3, 4, 4});
  for (const bool training : {true, false})
    for (const auto& residual :
         {torch::randn({2, 3, 4, 1}), torch::randn({3, 4, 4}), torch::randn({2, 3, 16}),
          torch::randn({2, 3, 4, 4}, torch::kDouble),
          torch::randn({2, 3, 4, 4}).to(torch::kHalf)}) {
      norm->train(training);
      const auto message = message_of<c10::Error>([&] { norm->forward(x, residual); });
      EXPECT_NE(message.find("block.norm: the residual must have"), std::string::npos) << message;
    }
  EXPECT_EQ(comm->counters().collectives(), 0);
  EXPECT_TRUE(torch::equal(norm->running_mean, torch::zeros({3})));
}

}  // namespace
}  // namespace syncnorm
