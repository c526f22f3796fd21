#include <gtest/gtest.h>
#include <torch/torch.h>

#include "common/autocast.h"
#include "common/device.h"
#include "common/failure.h"
#include "common/recipe.h"
#include "support/world.h"

namespace job {
namespace {

using syncnorm::testing::message_of;
using syncnorm::testing::new_world;

const c10::Device kGpu(c10::kCUDA, 1);

/// What choose_device() gives this rank, where those that have a GPU see it as kGpu; and what it
/// warns of.
c10::Device chosen(bool has_gpu, const std::string& wish, std::string& warning) {
  const auto world = new_world();
  Console console("program", world->rank() == 0, "lines");
  ::testing::internal::CaptureStderr();
  const auto device = choose_device(*world, has_gpu ? kGpu : c10::Device(c10::kCPU), wish, console);
  warning = ::testing::internal::GetCapturedStderr();
  return device;
}

TEST(Device, AutoTakesGpusWhereEveryRankHasOne) {
  std::string warning;
  EXPECT_EQ(chosen(true, "auto", warning), kGpu);
  EXPECT_EQ(chosen(false, "auto", warning), c10::kCPU);
  EXPECT_EQ(chosen(true, "cuda", warning), kGpu);
  EXPECT_EQ(chosen(true, "cpu", warning), c10::kCPU);
  EXPECT_EQ(warning, "");
}

TEST(Device, NoRankComputesElsewhereThanTheOthers) {
  const auto world = new_world();
  if (world->size() == 1) GTEST_SKIP() << "needs another rank";
  const int last = world->size() - 1;
  std::string warning;
  EXPECT_EQ(chosen(world->rank() != last, "auto", warning), c10::kCPU);
  if (world->rank() == 0) {
    const auto expected = "only " + std::to_string(last) + " of " + std::to_string(last + 1);
    EXPECT_NE(warning.find(expected), std::string::npos) << warning;
  }
  const auto message = message_of<Failure>([&] { chosen(world->rank() != last, "cuda", warning); });
  EXPECT_NE(message.find("rank " + std::to_string(last) + " on "), std::string::npos) << message;
  ::testing::internal::GetCapturedStderr();  // which the exception left open
}

TEST(Device, BatchesOfTheHostStayWhatTheyAre) {
  const auto batch = torch::randn({2, 3});
  EXPECT_TRUE(to_device(batch, c10::kCPU).is_same(batch));
}

torch::Dtype dtype_of_product(const torch::Tensor& x) { return torch::mm(x, x).scalar_type(); }

TEST(Autocast, HoldsWhileItLives) {
  const auto x = torch::randn({2, 2});
  {
    const Autocast outer(c10::kCPU, "bfloat16");
    EXPECT_EQ(dtype_of_product(x), torch::kBFloat16);
    {
      const Autocast inner(c10::kCPU, "bfloat16");
      EXPECT_EQ(dtype_of_product(x), torch::kBFloat16);
    }
    EXPECT_EQ(dtype_of_product(x), torch::kBFloat16);
  }
  EXPECT_EQ(dtype_of_product(x), torch::kFloat);
  const Autocast none(c10::kCPU, "float");
  EXPECT_EQ(dtype_of_product(x), torch::kFloat);
}

TEST(Autocast, SeesWhatTheOptimizerChanged) {
  auto weight = torch::ones({2, 2}, torch::requires_grad());
  for (const double expected : {2.0, 6.0}) {
    torch::Tensor y;
    {
      const Autocast autocast(c10::kCPU, "bfloat16");
      y = torch::mm(weight, torch::ones({2, 2}));
    }
    EXPECT_EQ(y[0][0].item<double>(), expected);
    y.sum().backward();
    EXPECT_EQ(weight.grad().scalar_type(), torch::kFloat);
    const torch::NoGradGuard no_grad;
    weight.add_(2);
  }
}

struct SomeRecipe {
  int64_t known = 1;
  std::string newer = "default";
};

template <typename R, typename F>
void visit(R& recipe, F each) {
  each("known", recipe.known);
  each("newer", recipe.newer);
}

TEST(Recipe, FieldsNewerThanTheCheckpointWereTheirDefaults) {
  const nlohmann::json saved = {{"known", 5}};
  SomeRecipe recipe;
  recipe.newer = "another";
  adopt_recipe(recipe, saved, {}, {});
  EXPECT_EQ(recipe.known, 5);
  EXPECT_EQ(recipe.newer, "default");

  recipe.newer = "another";
  const auto message =
      message_of<std::runtime_error>([&] { adopt_recipe(recipe, saved, {"newer"}, {}); });
  EXPECT_NE(message.find("--newer \"another\" (checkpoint: \"default\")"), std::string::npos)
      << message;
  adopt_recipe(recipe, saved, {"newer"}, {"newer"});
  EXPECT_EQ(recipe.newer, "another");
}

}  // namespace
}  // namespace job
