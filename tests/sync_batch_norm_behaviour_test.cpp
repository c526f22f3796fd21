// What numbers alone do not show: empty ranks, partial gradients, modes, memory orders, higher
// derivatives.
#include <gtest/gtest.h>

#include "support/batch.h"
#include "support/world.h"
#include "syncnorm/environment.h"
#include "syncnorm/sync_batch_norm.h"

namespace syncnorm {
namespace {

using testing::bit_equal_across;
using testing::message_of;
using testing::new_world;
using testing::relative_difference;

constexpr double kDouble = 1e-11;  // sums of some hundred terms on both sides

SyncBatchNorm make(int64_t channels, const std::shared_ptr<Communicator>& comm) {
  SyncBatchNorm module(SyncBatchNormOptions(channels).communicator(comm));
  module->to(torch::kDouble);
  return module;
}

TEST(SyncBatchNormBehaviour, EmptyRankInHalfPrecision) {
  const auto comm = new_world();
  SyncBatchNorm module(SyncBatchNormOptions(3).communicator(comm));
  const int64_t samples = comm->rank() == comm->size() - 1 && comm->size() > 1 ? 0 : 2;
  auto x = torch::randn({samples, 3, 2, 2}).to(torch::kHalf).set_requires_grad(true);
  const auto y = module->forward(x);
  EXPECT_EQ(y.sizes(), x.sizes());
  EXPECT_EQ(y.scalar_type(), torch::kHalf);
  y.sum().backward();
  ASSERT_TRUE(x.grad().defined());
  EXPECT_EQ(x.grad().sizes(), x.sizes());
  EXPECT_TRUE(bit_equal_across(*comm, module->running_var));
  if (samples == 0) {
    EXPECT_EQ(module->weight.grad().abs().max().item<float>(), 0);
  }
}

TEST(SyncBatchNormBehaviour, AllRanksEmptyLeaveBuffersAlone) {
  const auto comm = new_world();
  for (const auto& shape : std::vector<std::vector<int64_t>>{{0, 4}, {0, 4, 3, 3}, {2, 4, 0}}) {
    auto module = make(4, comm);
    module->options.eps(0);
    auto x = torch::empty(shape, torch::kDouble).set_requires_grad(true);
    const auto y = module->forward(x);
    EXPECT_EQ(y.sizes(), x.sizes());
    y.sum().backward();
    EXPECT_EQ(x.grad().sizes(), x.sizes());
    EXPECT_TRUE(torch::equal(module->weight.grad(), torch::zeros({4}, torch::kDouble)));
    EXPECT_TRUE(torch::equal(module->running_mean, torch::zeros({4}, torch::kDouble)));
    EXPECT_TRUE(torch::equal(module->running_var, torch::ones({4}, torch::kDouble)));
    EXPECT_EQ(module->num_batches_tracked.item<int64_t>(), 0);
  }
  // No channels at all, and the backward of the backward of nothing.
  functional::sync_batch_norm(
      torch::randn({2, 0}), {}, {},
      functional::SyncBatchNormFuncOptions().training(true).communicator(comm));
  auto module = make(4, comm);
  auto x = torch::empty({0, 4}, torch::kDouble).set_requires_grad(true);
  const auto first =
      torch::autograd::grad({module->forward(x).sum()}, {x, module->weight}, {}, true, true);
  (first[0].sum() + first[1].sum()).backward();
  EXPECT_EQ(module->weight.grad().abs().max().item<double>(), 0);
}

TEST(SyncBatchNormBehaviour, OneValueInTheWholeBatchIsAnErrorOnEveryRank) {
  const auto comm = new_world();
  auto module = make(2, comm);
  const auto message = message_of<c10::Error>([&] {
    module->forward(torch::ones({comm->rank() == 0 ? 1 : 0, 2}, torch::kDouble));
  });
  EXPECT_NE(message.find("more than 1 value"), std::string::npos) << message;
  EXPECT_TRUE(torch::equal(module->running_mean, torch::zeros({2}, torch::kDouble)));
  EXPECT_EQ(module->num_batches_tracked.item<int64_t>(), 0);
  // Nothing is broken: the next batch works, and one sample with several positions is enough.
  module->forward(torch::randn({comm->rank() == 0 ? 1 : 0, 2, 5}, torch::kDouble));
  EXPECT_EQ(module->num_batches_tracked.item<int64_t>(), 1);
}

TEST(SyncBatchNormBehaviour, AnyMemoryOrderGivesTheContiguousAnswer) {
  const auto comm = new_world();
  torch::manual_seed(comm->rank());
  const auto permuted = torch::randn({4, 5, 3, 2}, torch::kDouble).permute({0, 2, 1, 3});
  const auto dy = torch::randn({4, 3, 5, 2}, torch::kDouble);
  const auto run = [&](const torch::Tensor& input, const torch::Tensor& gradient) {
    auto module = make(3, comm);
    auto x = input.detach().set_requires_grad(true);
    const auto y = module->forward(x);
    y.backward(gradient);
    return std::make_pair(y, x.grad());
  };
  const auto [y, dx] = run(permuted.contiguous(), dy);
  constexpr auto kLast = torch::MemoryFormat::ChannelsLast;
  const std::vector<std::pair<torch::Tensor, torch::Tensor>> variants = {
      {permuted, dy},
      {permuted.contiguous(kLast), dy},
      {permuted.contiguous(), dy.contiguous(kLast)},
      {permuted.contiguous(kLast), dy.contiguous(kLast)},
      {torch::cat({permuted, permuted}, 3).slice(3, 0, 2), dy},
      {permuted.flip(0).contiguous().flip(0), dy.transpose(2, 3).contiguous().transpose(2, 3)},
  };
  for (size_t i = 0; i < variants.size(); ++i) {
    const auto [other_y, other_dx] = run(variants[i].first, variants[i].second);
    EXPECT_LT(relative_difference(other_y, y), kDouble) << i;
    EXPECT_LT(relative_difference(other_dx, dx), kDouble) << i;
  }
  const auto [expanded_y, expanded_dx] =
      run(permuted, torch::ones({1}, torch::kDouble).expand({4, 3, 5, 2}));
  EXPECT_LT(expanded_dx.abs().max().item<double>(), 1e-10);  // a constant gradient changes nothing
}

TEST(SyncBatchNormBehaviour, InputNeedsAGradientOnSomeRanksOnly) {
  const auto comm = new_world();
  for (const bool affine : {true, false}) {
    SyncBatchNorm module(SyncBatchNormOptions(3).affine(affine).communicator(comm));
    torch::manual_seed(comm->rank());
    auto x = torch::randn({4, 3, 2}).set_requires_grad(comm->rank() == 0);
    const auto y = module->forward(x);
    EXPECT_TRUE(y.requires_grad());  // ranks without a need of their own still take part
    y.square().sum().backward();
    EXPECT_EQ(x.grad().defined(), comm->rank() == 0);
    if (affine) {
      EXPECT_LT(
          relative_difference(module->weight.grad(), (2 * y * y).sum(std::vector<int64_t>{0, 2})),
          1e-5);
    }
  }
}

TEST(SyncBatchNormBehaviour, NoRankNeedsTheInputsGradient) {
  const auto comm = new_world();
  auto module = make(3, comm);
  const auto y = module->forward(torch::randn({4, 3, 2}, torch::kDouble));
  comm->reset_counters();
  y.sum().backward();
  EXPECT_EQ(comm->counters().collectives(), 0);
  EXPECT_TRUE(module->weight.grad().defined());
}

TEST(SyncBatchNormBehaviour, AnyCombinationOfRequiresGrad) {
  const auto comm = new_world();
  for (int mask = 0; mask < 8; ++mask) {
    auto module = make(2, comm);
    module->weight.set_requires_grad((mask & 1) != 0);
    module->bias.set_requires_grad((mask & 2) != 0);
    auto x = torch::randn({3, 2, 2}, torch::kDouble).set_requires_grad((mask & 4) != 0);
    const auto y = module->forward(x);
    EXPECT_EQ(y.requires_grad(), mask != 0);
    if (mask == 0) continue;
    y.square().sum().backward();
    EXPECT_EQ(module->weight.grad().defined(), (mask & 1) != 0);
    EXPECT_EQ(module->bias.grad().defined(), (mask & 2) != 0);
    EXPECT_EQ(x.grad().defined(), (mask & 4) != 0);
  }
}

TEST(SyncBatchNormBehaviour, EvaluationOnOneRankAlone) {
  const auto comm = new_world();
  auto module = make(2, comm);
  module->forward(torch::randn({4, 2}, torch::kDouble));
  module->eval();
  comm->reset_counters();
  if (comm->rank() == 0) {
    module->forward(torch::randn({1, 2}, torch::kDouble));
  }
  EXPECT_EQ(comm->counters().collectives(), 0);
  EXPECT_EQ(module->num_batches_tracked.item<int64_t>(), 1);
}

TEST(SyncBatchNormBehaviour, EvaluationInMixedPrecision) {
  const auto comm = self_communicator();
  for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
    for (const auto parameters : {dtype, torch::kFloat}) {
      for (const bool affine : {true, false}) {
        SyncBatchNorm module(SyncBatchNormOptions(3).affine(affine).communicator(comm));
        module->to(parameters);
        module->eval();
        auto x = torch::randn({4, 3, 2, 2}).to(dtype).set_requires_grad(true);
        const auto y = module->forward(x);
        EXPECT_EQ(y.scalar_type(), dtype);
        EXPECT_LT(relative_difference(y, x), 0x1p-7);
        y.sum().backward();
        EXPECT_EQ(x.grad().scalar_type(), dtype);
      }
    }
  }
  SyncBatchNorm module(SyncBatchNormOptions(3).communicator(comm));
  module->eval();
  EXPECT_EQ(module->forward(torch::empty({0, 3, 2, 2})).sizes(),
            (std::vector<int64_t>{0, 3, 2, 2}));
}

TEST(SyncBatchNormBehaviour, EvaluationWithoutTrackedStatisticsCommunicates) {
  const auto comm = new_world();
  SyncBatchNorm module(SyncBatchNormOptions(2).track_running_stats(false).communicator(comm));
  module->eval();
  comm->reset_counters();
  module->forward(torch::randn({2, 2}));
  EXPECT_EQ(comm->counters().all_reduce, 1);
}

TEST(SyncBatchNormBehaviour, NoGradDoesNotSwitchTrainingOff) {
  const auto comm = new_world();
  auto module = make(2, comm);
  const torch::NoGradGuard no_grad;
  const auto y = module->forward(torch::randn({4, 2}, torch::kDouble) * 3 + 5);
  EXPECT_LT(y.mean().abs().item<double>(), 2);
  EXPECT_EQ(module->num_batches_tracked.item<int64_t>(), 1);
}

TEST(SyncBatchNormBehaviour, BackwardTwiceWithRetainedGraph) {
  const auto comm = new_world();
  auto module = make(2, comm);
  auto x = torch::randn({4, 2}, torch::kDouble).set_requires_grad(true);
  const auto loss = module->forward(x).pow(3).sum();
  loss.backward({}, /*retain_graph=*/true);
  const auto once = x.grad().clone();
  loss.backward();
  EXPECT_LT(relative_difference(x.grad(), 2 * once), kDouble);
}

TEST(SyncBatchNormBehaviour, FrozenRunningStatisticsCountARecomputedBlockOnce) {
  const auto comm = new_world();
  auto module = make(2, comm);
  const auto x = torch::randn({4, 2}, torch::kDouble);
  const auto y = module->forward(x);
  const auto mean = module->running_mean.clone();
  {
    const FreezeRunningStatsGuard frozen;
    EXPECT_LT(relative_difference(module->forward(x), y), kDouble);
  }
  EXPECT_TRUE(torch::equal(module->running_mean, mean));
  EXPECT_EQ(module->num_batches_tracked.item<int64_t>(), 1);
  module->forward(x);
  EXPECT_EQ(module->num_batches_tracked.item<int64_t>(), 2);
}

/// However the counter was made, a step adds one to all of it, as add_ would.
TEST(SyncBatchNormBehaviour, CountsBatchesInCountersOfAnyKind) {
  const auto x = torch::randn({4, 2}, torch::kDouble);
  for (const auto& counter : {torch::full({}, 5, torch::kLong), torch::full({1}, 5, torch::kInt),
                              torch::full({3}, 5, torch::kLong), torch::empty({0}, torch::kLong)}) {
    auto module = make(2, new_world());
    module->num_batches_tracked = counter.clone();
    const auto version = module->num_batches_tracked._version();
    module->forward(x);
    EXPECT_TRUE(torch::equal(module->num_batches_tracked, counter + 1)) << counter.sizes();
    EXPECT_EQ(module->num_batches_tracked._version(), version + 1);
  }
}

TEST(SyncBatchNormBehaviour, GradientsAccumulate) {
  const auto comm = new_world();
  auto module = make(2, comm);
  torch::manual_seed(comm->rank());
  const auto x = torch::randn({4, 2}, torch::kDouble);
  module->forward(x).pow(3).sum().backward();
  const auto once = module->weight.grad().clone();
  module->forward(x).pow(3).sum().backward();
  EXPECT_LT(relative_difference(module->weight.grad(), 2 * once), kDouble);
}

/// Gradient of a scalar of the first gradients, for one process or many.
struct SecondOrder {
  torch::Tensor dx, dweight, ddy;
};

template <typename Forward>
SecondOrder second_order(const torch::Tensor& x0, const torch::Tensor& dy0,
                         const torch::Tensor& probe, Forward&& forward) {
  auto x = x0.clone().set_requires_grad(true);
  auto w = torch::linspace(0.5, 2, x0.size(1), torch::kDouble).set_requires_grad(true);
  auto b = torch::zeros({x0.size(1)}, torch::kDouble).set_requires_grad(true);
  auto dy = dy0.clone().set_requires_grad(true);
  const auto y = forward(x, w, b);
  const auto first = torch::autograd::grad({(y * dy).sum()}, {x, w, b}, {}, true, true);
  const auto scalar = (first[0] * probe).sum() + first[1].pow(2).sum() + first[2].sum();
  const auto second = torch::autograd::grad({scalar}, {x, w, dy}, {}, false, false, true);
  return {second[0], second[1], second[2]};
}

TEST(SyncBatchNormBehaviour, DoubleBackwardEqualsTheSingleProcess) {
  const auto comm = new_world();
  torch::manual_seed(1);
  const auto x = torch::randn({6, 3, 2, 2}, torch::kDouble) * 2 + 1;
  const auto dy = torch::randn_like(x);
  const auto probe = torch::randn_like(x);
  // On one rank against ATen's own double backward.
  const auto plain = [](const torch::Tensor& in, const torch::Tensor& w, const torch::Tensor& b) {
    return torch::batch_norm(in, w, b, {}, {}, true, 0.1, 1e-5, false);
  };
  const auto ours_over = [](const std::shared_ptr<Communicator>& group) {
    return [group](const torch::Tensor& in, const torch::Tensor& w, const torch::Tensor& b) {
      return functional::sync_batch_norm(
          in, {}, {},
          functional::SyncBatchNormFuncOptions().weight(w).bias(b).training(true).communicator(
              group));
    };
  };
  const auto expected = second_order(x, dy, probe, plain);
  const auto alone = second_order(x, dy, probe, ours_over(self_communicator()));
  EXPECT_LT(relative_difference(alone.dx, expected.dx), kDouble);
  EXPECT_LT(relative_difference(alone.dweight, expected.dweight), kDouble);
  EXPECT_LT(relative_difference(alone.ddy, expected.ddy), kDouble);

  // Over ranks: the scalar is the sum of the ranks' scalars. dweight is a local sum, so its square
  // needs the sum first; with the probe alone the scalars add up as they are.
  std::vector<int64_t> sizes(comm->size(), 0);
  for (int i = 0; i < 6; ++i) ++sizes[i % comm->size()];
  const auto run = [&](const torch::Tensor& x0, const torch::Tensor& dy0, const torch::Tensor& v,
                       const std::shared_ptr<Communicator>& group) {
    auto input = x0.clone().set_requires_grad(true);
    auto gradient = dy0.clone().set_requires_grad(true);
    auto w = torch::linspace(0.5, 2, 3, torch::kDouble).set_requires_grad(true);
    const auto b = torch::zeros({3}, torch::kDouble);
    const auto y = ours_over(group)(input, w, b);
    const auto first = torch::autograd::grad({(y * gradient).sum()}, {input, w}, {}, true, true);
    const auto scalar =
        (first[0] * v).sum() + (first[1] * torch::arange(1, 4, torch::kDouble)).sum();
    return torch::autograd::grad({scalar}, {input, gradient, w});
  };
  const auto whole = run(x, dy, probe, self_communicator());
  const auto mine = [&](const torch::Tensor& t) {
    return testing::shard_of(t, sizes, comm->rank());
  };
  const auto parts = run(mine(x), mine(dy), mine(probe), comm);
  EXPECT_LT(relative_difference(parts[0], mine(whole[0])), kDouble);
  EXPECT_LT(relative_difference(parts[1], mine(whole[1])), kDouble);
  const auto dweight = parts[2].clone();
  comm->all_reduce(dweight);
  EXPECT_LT(relative_difference(dweight, whole[2]), kDouble);
}

TEST(SyncBatchNormBehaviour, SecondExchangeIsCountedAndRare) {
  const auto comm = new_world();
  SyncBatchNorm module(SyncBatchNormOptions(2).communicator(comm));
  comm->reset_counters();
  module->forward(torch::randn({8, 2, 4}) + 100);
  EXPECT_EQ(comm->counters().second_exchanges, 0);
  module->forward(torch::randn({8, 2, 4}) + 1e6);
  EXPECT_EQ(comm->counters().second_exchanges, 1);
}

TEST(SyncBatchNormBehaviour, BadInputIsAnErrorBeforeAnyCommunication) {
  const auto comm = new_world();
  comm->reset_counters();
  SyncBatchNorm module(SyncBatchNormOptions(3).communicator(comm).name("stem.norm"));
  const auto expect = [&](const torch::Tensor& input, const char* words) {
    const auto message = message_of<c10::Error>([&] { module->forward(input); });
    EXPECT_NE(message.find("stem.norm"), std::string::npos) << message;
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  expect(torch::randn({3}), "expected input");
  expect(torch::randn({1, 3, 1, 1, 1, 1}), "expected input");
  expect(torch::randn({2, 4}), "expected 3 channels");
  expect(torch::ones({2, 3}, torch::kLong), "must be double, float, half or bfloat16");
  expect(torch::randn({2, 3}, torch::kDouble), "must match");
  expect(torch::Tensor(), "undefined");
  EXPECT_THROW(SyncBatchNorm(SyncBatchNormOptions(0)), c10::Error);
  EXPECT_THROW(
      functional::sync_batch_norm(
          torch::randn({2, 3}), {}, {},
          functional::SyncBatchNormFuncOptions().training(true).eps(-1).communicator(comm)),
      c10::Error);
  module->options.eps(-1);
  expect(torch::randn({2, 3}), "eps");
  EXPECT_EQ(comm->counters().collectives(), 0);
}

TEST(SyncBatchNormBehaviour, UsesTheEnvironmentsWorldByDefault) {
  SyncBatchNorm module(2);
  const auto& world = Environment::current()->world();
  const auto before = world->counters().all_reduce;
  module->forward(torch::randn({4, 2}));
  EXPECT_EQ(world->counters().all_reduce, before + 1);
}

TEST(SyncBatchNormBehaviour, CloneKeepsStateAndCommunicator) {
  const auto comm = new_world();
  SyncBatchNorm module(SyncBatchNormOptions(2).communicator(comm).name("a"));
  module->forward(torch::randn({4, 2}) + 2);
  const auto copy = std::dynamic_pointer_cast<SyncBatchNormImpl>(module->clone());
  EXPECT_TRUE(torch::equal(copy->running_mean, module->running_mean));
  EXPECT_NE(copy->running_mean.data_ptr(), module->running_mean.data_ptr());
  EXPECT_EQ(copy->options.communicator(), comm);
  copy->forward(torch::randn({4, 2}));
  EXPECT_EQ(module->num_batches_tracked.item<int64_t>(), 1);
}

TEST(SyncBatchNormBehaviour, WorksInSequential) {
  const auto comm = new_world();
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).bias(false)),
                            SyncBatchNorm(SyncBatchNormOptions(4).communicator(comm)),
                            torch::nn::ReLU());
  net->forward(torch::randn({2, 1, 6, 6})).sum().backward();
  EXPECT_EQ(net->named_buffers().size(), 3);
  std::ostringstream text;
  text << net;
  EXPECT_NE(text.str().find("SyncBatchNorm(4, eps=1e-05, momentum=0.1"), std::string::npos)
      << text.str();
}

}  // namespace
}  // namespace syncnorm
