// What numbers alone do not show of norms of split rows, much of it met by users of other
// libraries.
#include <gtest/gtest.h>

#include "support/columns.h"
#include "syncnorm/tensor_parallel_norm.h"

namespace syncnorm {
namespace {

using testing::columns_of;
using testing::message_of;
using testing::new_world;

TEST(TensorParallelNormBehaviour, HalfRowsWhoseSquaresOverflow) {
  const auto comm = new_world();
  TensorParallelRMSNorm norm(TensorParallelRMSNormOptions(64).communicator(comm));
  const auto h = norm->weight.size(0);
  for (const double value : {300.0, 60000.0}) {
    const auto y = norm(torch::full({3, h}, value, torch::kHalf));
    EXPECT_TRUE(torch::equal(y, torch::ones({3, h}, torch::kHalf)));
  }
  EXPECT_TRUE(torch::equal(norm(torch::full({3, h}, 1e18, torch::kFloat)), torch::ones({3, h})));
}

TEST(TensorParallelNormBehaviour, UnitOffsetIsAddedInFloat) {
  const auto comm = new_world();
  TensorParallelRMSNorm norm(TensorParallelRMSNormOptions(8).unit_offset(true).communicator(comm));
  const torch::NoGradGuard no_grad;
  norm->weight.fill_(0.00390625);
  const auto h = norm->weight.size(0);
  // Rows 3, 3, .. and 0: rms 3 / sqrt(2); 1.00390625 * sqrt(2) is 1.41974, bfloat16 1.421875,
  // while sqrt(2) with the offset lost is 1.4140625.
  auto x = torch::zeros({1, 8}, torch::kBFloat16);
  x.slice(1, 0, 4).fill_(3);
  const auto y = norm(columns_of(x, balanced_shards(8, comm->size()), comm->rank()));
  EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
  const auto expected =
      columns_of(x / 3 * 1.421875, balanced_shards(8, comm->size()), comm->rank());
  EXPECT_EQ(y.sizes(), torch::IntArrayRef({1, h}));
  EXPECT_TRUE(torch::equal(y, expected.to(torch::kBFloat16)));
}

TEST(TensorParallelNormBehaviour, ResidualSumIsRoundedOnceAndNormalisedAsRounded) {
  const auto comm = new_world();
  const auto shards = balanced_shards(24, comm->size());
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    torch::manual_seed(8);
    const auto whole_x = torch::randn({4, 24}).to(dtype);
    const auto whole_residual = (torch::randn({4, 24}) * 8).to(dtype);
    TensorParallelRMSNorm norm(TensorParallelRMSNormOptions(24).communicator(comm));
    auto x = columns_of(whole_x, shards, comm->rank()).set_requires_grad(true);
    auto residual = columns_of(whole_residual, shards, comm->rank()).set_requires_grad(true);
    const auto [y, sum] = norm(x, residual);
    const auto rounded = (x.to(torch::kDouble) + residual.to(torch::kDouble)).to(dtype);
    EXPECT_TRUE(torch::equal(sum, rounded));
    EXPECT_TRUE(torch::equal(y, norm(sum)));
    (y.sum() + sum.sum()).backward();
    EXPECT_TRUE(torch::equal(x.grad(), residual.grad()));
  }
}

TEST(TensorParallelNormBehaviour, ConstantRowsCostNoSecondExchange) {
  const auto comm = new_world();
  TensorParallelLayerNorm norm(TensorParallelLayerNormOptions(24).communicator(comm));
  auto x = torch::randn({3, norm->weight.size(0)});
  x[1].fill_(5);  // padding, whose variance of zero is known well enough beside eps
  const auto y = norm(x);
  EXPECT_EQ(comm->counters().second_exchanges, 0);
  EXPECT_TRUE(torch::equal(y[1], torch::zeros_like(y[1])));
}

TEST(TensorParallelNormBehaviour, WorksInSequential) {
  const auto comm = new_world();
  torch::nn::Sequential net(
      TensorParallelLayerNorm(TensorParallelLayerNormOptions(9).communicator(comm)),
      TensorParallelRMSNorm(TensorParallelRMSNormOptions(9).communicator(comm)));
  const auto h = balanced_shards(9, comm->size())[comm->rank()];
  EXPECT_EQ(net->forward(torch::randn({2, h})).size(1), h);
}

TEST(TensorParallelNormBehaviour, WeightGradientsAreTheSameBitsEveryTime) {
  const auto comm = new_world();
  torch::manual_seed(1);
  TensorParallelLayerNorm norm(TensorParallelLayerNormOptions(100).communicator(comm));
  const auto x = torch::randn({3000, norm->weight.size(0)});
  const auto gradient = [&] {
    norm->zero_grad();
    const auto y = norm(x);
    y.sin().sum().backward({}, /*retain_graph=*/true);
    return norm->weight.grad().clone();
  };
  const auto first = gradient();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(torch::equal(first, gradient()));
}

TEST(TensorParallelNormBehaviour, RefusesWhatDoesNotFit) {
  const auto comm = new_world();
  TensorParallelLayerNorm norm(TensorParallelLayerNormOptions(8).communicator(comm).name("ln"));
  const auto h = norm->weight.size(0);
  const auto says = [&](const std::string& expected, auto&& body) {
    const auto message = message_of<c10::Error>(body);
    EXPECT_NE(message.find(expected), std::string::npos) << message;
  };
  says("expects an input [..., " + std::to_string(h), [&] { norm(torch::randn({2, h + 1})); });
  says("undefined", [&] { norm(torch::Tensor()); });
  says("must be double, float", [&] { norm(torch::ones({2, h}, torch::kInt)); });
  says("must match", [&] { norm(torch::ones({2, h}, torch::kDouble)); });
  says("one shape and dtype", [&] { norm(torch::ones({2, h}), torch::ones({3, h})); });
  says("hidden must be positive",
       [&] { TensorParallelRMSNorm(TensorParallelRMSNormOptions(0).communicator(comm)); });
  says("add up to", [&] {
    TensorParallelRMSNorm(TensorParallelRMSNormOptions(8).communicator(comm).shard_sizes(
        std::vector<int64_t>(comm->size(), 9)));
  });
  says("one shard size for each", [&] {
    TensorParallelRMSNorm(TensorParallelRMSNormOptions(8).communicator(comm).shard_sizes(
        std::vector<int64_t>(comm->size() + 1, 1)));
  });
  EXPECT_EQ(comm->counters().collectives(), 0);
}

TEST(TensorParallelNormBehaviour, FunctionalFormChecksThatTheShardsAddUp) {
  const auto comm = new_world();
  const auto x = torch::randn({3, 4});
  const auto message = message_of<c10::Error>([&] {
    functional::tensor_parallel_rms_norm(
        x, functional::TensorParallelRMSNormFuncOptions(4 * comm->size() + 1).communicator(comm));
  });
  EXPECT_NE(message.find("add up to"), std::string::npos) << message;
  const auto y = functional::tensor_parallel_layer_norm(
      x, functional::TensorParallelLayerNormFuncOptions(4 * comm->size()).communicator(comm));
  auto total = y.sum(-1).to(torch::kDouble);
  comm->all_reduce(total);
  EXPECT_LT(total.abs().max().item<double>(), 1e-4);
}

TEST(TensorParallelNormBehaviour, DisagreementIsAnErrorOnEveryRank) {
  const auto world = new_world();
  if (world->size() < 2) GTEST_SKIP() << "needs two ranks";
  const bool odd = world->rank() == 1;
  const auto fails = [&](const TensorParallelRMSNormOptions& options, const std::string& field) {
    const auto comm = new_world();
    auto mine = options;
    TensorParallelRMSNorm norm(mine.communicator(comm).name("rows"));
    const auto message = message_of<CommunicationError>([&] {
      norm(torch::randn({field == "rows" && odd ? 3 : 2, norm->weight.size(0)}));
    });
    EXPECT_NE(message.find(field + " differs"), std::string::npos) << message;
    EXPECT_NE(message.find("rows"), std::string::npos) << message;
  };
  fails(TensorParallelRMSNormOptions(8).eps(odd ? 1e-3 : 1e-6), "eps");
  fails(TensorParallelRMSNormOptions(8).unit_offset(odd), "unit offset");
  fails(TensorParallelRMSNormOptions(8), "rows");
}

TEST(TensorParallelNormBehaviour, ClonesAndPrints) {
  const auto comm = new_world();
  TensorParallelRMSNorm norm(TensorParallelRMSNormOptions(6).communicator(comm).name("first"));
  norm->weight.data().fill_(2);
  const auto copy = std::dynamic_pointer_cast<TensorParallelRMSNormImpl>(norm->clone());
  EXPECT_TRUE(torch::equal(copy->weight, norm->weight));
  EXPECT_FALSE(copy->weight.is_alias_of(norm->weight));
  EXPECT_EQ(copy->display_name(), "first");
  std::ostringstream text;
  text << *norm;
  EXPECT_NE(text.str().find("TensorParallelRMSNorm(6 over"), std::string::npos);
}

}  // namespace
}  // namespace syncnorm
