// Exchanges that the host does not wait for: what is queued, and errors that are told later.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <functional>

#include "support/world.h"
#include "syncnorm/group_norm.h"
#include "syncnorm/sync_batch_norm.h"
#include "syncnorm/tensor_parallel_norm.h"

namespace cuda_emulation {
int64_t launches();  // of kernels so far, see support/cuda_emulation
}

namespace syncnorm {
namespace {

using testing::bit_equal_across;
using testing::new_world;

SyncBatchNorm batch_norm(int64_t channels, const std::shared_ptr<Communicator>& comm) {
  return SyncBatchNorm(SyncBatchNormOptions(channels).communicator(comm).name("bn"));
}

TEST(Deferred, AStepIsFourKernelsAndTwoCollectives) {
  const auto comm = new_world();
  auto norm = batch_norm(7, comm);
  torch::manual_seed(comm->rank());
  for (const auto& sizes : {std::vector<int64_t>{3, 7, 5, 5}, {0, 7, 5, 5}, {2, 7, 64, 64}}) {
    const auto x = torch::randn(sizes).set_requires_grad(true);
    comm->reset_counters();
    const auto start = cuda_emulation::launches();
    const auto y = norm(x);
    EXPECT_EQ(cuda_emulation::launches() - start, 2);
    EXPECT_EQ(comm->counters().collectives(), 1);
    y.backward(torch::randn_like(y));
    EXPECT_EQ(cuda_emulation::launches() - start, 4);
    EXPECT_EQ(comm->counters().collectives(), 2);
  }
  check_device_results(comm);
  EXPECT_TRUE(bit_equal_across(*comm, norm->running_mean));
  EXPECT_TRUE(bit_equal_across(*comm, norm->running_var));
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 2);  // one batch was empty on every rank
}

TEST(Deferred, WhereNoInputNeedsAGradientNothingIsWaitedFor) {
  const auto comm = new_world();
  auto norm = batch_norm(3, comm);
  norm(torch::randn({4, 3})).sum().backward();
  EXPECT_TRUE(norm->bias.grad().defined());
  check_device_results(comm);
}

TEST(Deferred, OneValueInAllIsToldLater) {
  const auto comm = new_world();
  auto norm = batch_norm(4, comm);
  const auto x = torch::randn({comm->rank() == 0 ? 1 : 0, 4});
  const auto y = norm(x);
  EXPECT_TRUE(y.isnan().all().item<bool>());
  EXPECT_THROW(check_device_results(comm), c10::Error);
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 0);
  EXPECT_TRUE(norm->running_mean.eq(0).all().item<bool>());
  EXPECT_FALSE(norm(torch::randn({2, 4})).isnan().any().item<bool>());  // and it goes on
  check_device_results(comm);
}

TEST(Deferred, NoValueInAllChangesNothing) {
  const auto comm = new_world();
  auto norm = batch_norm(4, comm);
  EXPECT_EQ(norm(torch::empty({0, 4, 3})).numel(), 0);
  check_device_results(comm);
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 0);
}

TEST(Deferred, TheCumulativeAverageIsTakenOnTheDevice) {
  const auto comm = new_world();
  SyncBatchNorm norm(SyncBatchNormOptions(2).momentum(std::nullopt).communicator(comm));
  auto expected = torch::zeros({2}, torch::kDouble);
  for (int step = 1; step <= 3; ++step) {
    torch::manual_seed(step);
    const auto x = torch::randn({6, 2}) + step;
    norm(x);
    expected += (x.to(torch::kDouble).mean(0) - expected) / step;
  }
  check_device_results(comm);
  EXPECT_LT(testing::relative_difference(norm->running_mean, expected), 1e-6);
}

/// What differs between the ranks, and how it is told.
struct Difference {
  const char* name;
  std::function<torch::Tensor(const std::shared_ptr<Communicator>&)> forward;
};

class DeferredDisagreement : public ::testing::TestWithParam<Difference> {};

TEST_P(DeferredDisagreement, MakesNaNAndIsToldByEveryRank) {
  const auto comm = new_world();
  if (comm->size() == 1) GTEST_SKIP() << "needs two ranks";
  const auto y = GetParam().forward(comm);
  EXPECT_TRUE(y.isnan().all().item<bool>());
  try {
    check_device_results(comm);
    FAIL() << "the disagreement was not told";
  } catch (const CommunicationError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("of bn on"), std::string::npos) << text;
    EXPECT_NE(text.find("rank " + std::to_string(comm->rank())), std::string::npos) << text;
  }
  EXPECT_THROW(comm->barrier(), CommunicationError);
}

INSTANTIATE_TEST_SUITE_P(
    Of, DeferredDisagreement,
    ::testing::Values(Difference{"eps",
                                 [](const auto& comm) {
                                   SyncBatchNorm norm(SyncBatchNormOptions(3)
                                                          .eps(comm->rank() == 0 ? 1e-5 : 1e-3)
                                                          .communicator(comm)
                                                          .name("bn"));
                                   return norm(torch::randn({4, 3}));
                                 }},
                      Difference{"running_mean",
                                 [](const auto& comm) {
                                   auto norm = batch_norm(3, comm);
                                   norm->running_mean[2] = comm->rank() == 0 ? 0.5 : 0.25;
                                   return norm(torch::randn({4, 3}));
                                 }},
                      Difference{"dtype",
                                 [](const auto& comm) {
                                   auto norm = batch_norm(3, comm);
                                   return norm(torch::randn({4, 3}).to(
                                       comm->rank() == 0 ? torch::kHalf : torch::kBFloat16));
                                 }}),
    [](const auto& info) { return info.param.name; });

TEST(Deferred, ShardsThatDoNotFitAreTold) {
  const auto comm = new_world();
  TensorParallelRMSNorm norm(
      TensorParallelRMSNormOptions(8 * comm->size()).communicator(comm).name("rms"));
  EXPECT_FALSE(norm(torch::randn({5, 8})).isnan().any().item<bool>());
  check_device_results(comm);
}

TEST(Deferred, WeightsThatRanksSumAreCheckedWhereNothingElseIsWritten) {
  const auto comm = new_world();
  if (comm->size() == 1) GTEST_SKIP() << "needs two ranks";
  const auto norm = [&](const char* name) {
    return ParallelGroupNorm(
        ParallelGroupNormOptions(2, 4).split(Split::space).communicator(comm).name(name));
  };
  auto first = norm("first"), second = norm("second");
  const auto a = first(torch::randn({2, 4, 5})), b = second(torch::randn({2, 4, 5}));
  (comm->rank() == 0 ? a : b).sum().backward();
  const auto& weight = comm->rank() == 0 ? first->weight : second->weight;
  EXPECT_TRUE(weight.grad().isnan().all().item<bool>());
  EXPECT_THROW(check_device_results(comm), CommunicationError);
}

TEST(Deferred, BadArgumentsLeaveNothingToWaitFor) {
  const auto comm = new_world();
  const auto mean = torch::zeros({3, 2}).select(1, 0), variance = torch::ones({3});
  const auto options = functional::SyncBatchNormFuncOptions().training(true).communicator(comm);
  EXPECT_THROW(functional::sync_batch_norm(torch::randn({4, 3}), mean, variance, options),
               c10::Error);
  EXPECT_EQ(comm->counters().collectives(), 0);
  check_device_results(comm);
}

TEST(Deferred, ARankThatGaveUpIsNotWaitedFor) {
  const auto comm = new_world();
  if (comm->size() == 1) GTEST_SKIP() << "needs two ranks";
  SyncBatchNorm norm(
      SyncBatchNormOptions(3).eps(comm->rank() == 0 ? 1e-5 : 1e-3).communicator(comm).name("bn"));
  norm(torch::randn({4, 3}));
  const auto start = std::chrono::steady_clock::now();
  if (comm->rank() == 0) {
    EXPECT_THROW(check_device_results(comm), CommunicationError);
  } else {
    EXPECT_THROW(comm->barrier(), CommunicationError);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));  // of 600
}

TEST(Deferred, BackwardThatDisagreesGivesNaN) {
  const auto comm = new_world();
  if (comm->size() == 1) GTEST_SKIP() << "needs two ranks";
  auto first = SyncBatchNorm(SyncBatchNormOptions(3).communicator(comm).name("first"));
  auto second = SyncBatchNorm(SyncBatchNormOptions(3).communicator(comm).name("second"));
  const auto x = torch::randn({4, 3}).set_requires_grad(true);
  const auto z = torch::randn({4, 3}).set_requires_grad(true);
  const auto a = first(x), b = second(z);
  (comm->rank() == 0 ? a : b).sum().backward();
  EXPECT_TRUE((comm->rank() == 0 ? x : z).grad().isnan().all().item<bool>());
  EXPECT_THROW(check_device_results(comm), CommunicationError);
}

}  // namespace
}  // namespace syncnorm
