// Clipping of gradients over split and replicated parameters against torch::nn::utils on one
// process.
#include "syncnorm/parameters.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/world.h"
#include "syncnorm/linear.h"

namespace syncnorm {
namespace {

namespace nn = torch::nn;
using testing::message_of;
using testing::new_world;
using testing::relative_difference;
using torch::Tensor;

// Sums of a few hundred squares in another order.
constexpr double kTolerance = 1e-13;

using Comm = std::shared_ptr<Communicator>;

/// Rows that ranks share, fewer rows than ranks, columns, and replicated parameters.
nn::Sequential sharded_model(const Comm& comm) {
  return nn::Sequential(ColumnParallelLinear(ColumnParallelLinearOptions(4, 16)
                                                 .rows(qkv_rows(4, 2, 2, comm->size()))
                                                 .communicator(comm)),
                        ColumnParallelLinear(ColumnParallelLinearOptions(4, 3).communicator(comm)),
                        RowParallelLinear(RowParallelLinearOptions(5, 4).communicator(comm)),
                        nn::LayerNorm(nn::LayerNormOptions({4})));
}

/// Gives each whole parameter a random gradient, the same on all ranks, and each shard its part;
/// returns the whole ones as parameters of one process.
std::vector<Tensor> set_gradients(const std::vector<ShardedTensor>& parameters) {
  std::vector<Tensor> whole;
  for (const auto& p : parameters) {
    auto shape = p.sharding.whole_shape(p.tensor.sizes());
    whole.push_back(torch::zeros(shape, torch::kDouble).set_requires_grad(true));
    whole.back().mutable_grad() = torch::randn(shape, torch::kDouble);
    auto tensor = p.tensor;
    tensor.mutable_grad() = p.sharding.shard_of(whole.back().grad()).clone();
  }
  return whole;
}

TEST(ClipGradNorm, CountsEachElementOfTheWholeModelOnce) {
  const auto comm = new_world();
  torch::manual_seed(1);
  auto model = sharded_model(comm);
  model->to(torch::kDouble);
  const auto parameters = sharded_tensors(*model);
  for (const double p : {2.0, 1.0, 3.5, std::numeric_limits<double>::infinity()}) {
    for (const double max_norm : {0.5, 1e6}) {
      SCOPED_TRACE(c10::str("p ", p, " max_norm ", max_norm));
      const auto whole = set_gradients(parameters);
      const double expected = nn::utils::clip_grad_norm_(whole, max_norm, p);
      comm->reset_counters();
      const double norm = clip_grad_norm(*model, max_norm, comm, p);
      EXPECT_EQ(comm->counters().collectives(), 1);
      EXPECT_EQ(comm->counters().bytes, 8);
      EXPECT_NEAR(norm, expected, kTolerance * expected);
      EXPECT_TRUE(testing::bit_equal_across(*comm, torch::tensor({norm}, torch::kDouble)));
      for (size_t i = 0; i < parameters.size(); ++i) {
        const auto& [name, tensor, sharding] = parameters[i];
        EXPECT_LE(relative_difference(tensor.grad(), sharding.shard_of(whole[i].grad())),
                  kTolerance)
            << name;
      }
    }
  }
}

TEST(ClipGradNorm, SkipsWhatHasNoGradientAndCountsTiedParametersOnce) {
  const auto comm = new_world();
  auto tied = std::make_shared<nn::LinearImpl>(nn::LinearOptions(2, 2).bias(false));
  nn::Sequential model;
  model->push_back("first", tied);
  model->push_back("second", tied);
  model->push_back("unused", nn::Linear(3, 3));
  tied->weight.mutable_grad() = torch::full({2, 2}, 3.0);
  EXPECT_NEAR(clip_grad_norm(*model, 2.0, comm), 6, 1e-12);
  EXPECT_NEAR(tied->weight.grad().max().item<double>(), 1, 1e-6);  // 3 * 2 / (6 + 1e-6) in float
}

TEST(ClipGradNorm, AccumulatesHalfTypesBeyondTheirRange) {
  const auto comm = new_world();
  nn::Linear model(nn::LinearOptions(64, 64).bias(false));
  model->to(torch::kHalf);
  model->weight.mutable_grad() = torch::full({64, 64}, 300, torch::kHalf);  // its square overflows
  EXPECT_NEAR(clip_grad_norm(*model, 1.0, comm), 300 * 64.0, 1e-9);
}

TEST(ClipGradNorm, ReportsNormsThatAreNotFiniteOnEveryRank) {
  const auto comm = new_world();
  auto model = sharded_model(comm);
  const auto parameters = sharded_tensors(*model);
  set_gradients(parameters);
  // Only the last rank sees it.
  auto own = model->at<RowParallelLinearImpl>(2).weight;
  if (comm->rank() == comm->size() - 1 && own.numel() > 0)
    own.mutable_grad().fill_(std::numeric_limits<double>::infinity());
  const auto before = parameters[0].tensor.grad().clone();
  const auto text = message_of<c10::Error>([&] { clip_grad_norm(*model, 1.0, comm, 2, true); });
  EXPECT_NE(text.find("is inf; nothing was changed"), std::string::npos) << text;
  EXPECT_TRUE(torch::equal(parameters[0].tensor.grad(), before));
  EXPECT_TRUE(std::isinf(clip_grad_norm(*model, 1.0, comm)));
}

TEST(ClipGradNorm, NoRanksNaNIsLostInTheLargest) {
  const auto comm = new_world();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (int from = 0; from < comm->size(); ++from) {
    auto gradient = torch::tensor({-2.0, 1.0}, torch::kDouble);
    const auto shard = Sharding::consecutive(comm, 0, std::vector<int64_t>(comm->size(), 2));
    const ShardedTensor parameter{"weight", torch::zeros_like(gradient).requires_grad_(), shard};
    auto tensor = parameter.tensor;
    tensor.mutable_grad() = gradient;
    EXPECT_EQ(clip_grad_norm({parameter}, 9, comm, kInfinity), 2);
    if (comm->rank() == from) gradient[1] = std::numeric_limits<double>::quiet_NaN();
    EXPECT_THROW(clip_grad_norm({parameter}, 9, comm, kInfinity, true), c10::Error) << from;
    EXPECT_TRUE(std::isnan(clip_grad_norm({parameter}, 9, comm, kInfinity))) << from;
  }
}

TEST(ClipGradNorm, ErrorsBeforeCommunication) {
  const auto comm = new_world();
  auto model = sharded_model(comm);
  comm->reset_counters();
  for (const auto& text : {
           message_of<c10::Error>([&] { clip_grad_norm(*model, -1.0, comm); }),
           message_of<c10::Error>([&] { clip_grad_norm(*model, 1.0, comm, 0); }),
       }) {
    EXPECT_NE(text.find("clip_grad_norm"), std::string::npos) << text;
  }
  if (comm->size() > 1) {
    const auto group =
        message_of<c10::Error>([&] { clip_grad_norm(*model, 1.0, self_communicator()); });
    EXPECT_NE(group.find("'0.weight' is cut for"), std::string::npos) << group;
  }
  EXPECT_EQ(comm->counters().collectives(), 0);
}

TEST(ClipGradNorm, OptimizerStepsOverShardsEqualThoseOnTheWhole) {
  const auto comm = new_world();
  torch::manual_seed(2);
  auto model = sharded_model(comm);
  model->to(torch::kDouble);
  const auto parameters = sharded_tensors(*model);
  auto whole = set_gradients(parameters);
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < whole.size(); ++i) {
      whole[i].normal_();
      auto tensor = parameters[i].tensor;
      tensor.copy_(parameters[i].sharding.shard_of(whole[i].detach()));
    }
  }
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  torch::optim::AdamW reference(whole, torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < 5; ++step) {
    for (size_t i = 0; i < whole.size(); ++i) {
      whole[i].mutable_grad() = torch::randn(whole[i].sizes(), torch::kDouble);
      auto tensor = parameters[i].tensor;
      tensor.mutable_grad() = parameters[i].sharding.shard_of(whole[i].grad()).clone();
    }
    nn::utils::clip_grad_norm_(whole, 1.0);
    clip_grad_norm(*model, 1.0, comm);
    reference.step();
    optimizer.step();
  }
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_LE(relative_difference(parameters[i].tensor, parameters[i].sharding.shard_of(whole[i])),
              kTolerance);
  }
}

}  // namespace
}  // namespace syncnorm
