// SyncBatchNorm against torch::nn::BatchNorm in double on the gathered batch, over random shapes,
// options, dtypes, memory formats and shards.
#include "syncnorm/sync_batch_norm.h"

#include <gtest/gtest.h>

#include "support/batch_norm_trial.h"

namespace syncnorm {
namespace {

using testing::bit_equal_across;
using testing::new_world;
using testing::batch_norm::random_trial;
using testing::batch_norm::run;
using testing::batch_norm::Trial;

TEST(SyncBatchNorm, EqualsBatchNormOnTheGatheredBatch) {
  const auto comm = new_world();
  std::mt19937 generator(2024);
  for (int i = 0; i < 60; ++i) {
    SCOPED_TRACE("trial " + std::to_string(i));
    run(random_trial(generator, comm->size()), comm, i);
  }
}

TEST(SyncBatchNorm, FloatKeepsItsDigitsFarFromZero) {
  if (!testing::host_waits()) GTEST_SKIP() << "no second exchange";
  const auto comm = new_world();
  Trial trial;
  trial.shape = {8, 5, 6, 6};
  trial.shards.assign(comm->size(), 0);
  for (int i = 0; i < 8; ++i) ++trial.shards[i % comm->size()];
  trial.dtype = trial.parameter_dtype = torch::kFloat;
  trial.offset = 1e6;  // the first center is zero: 1e6 standard deviations off
  run(trial, comm, 5);
}

TEST(SyncBatchNorm, LongChannelsKeepFloatAccuracy) {
  const auto comm = new_world();
  Trial trial;
  trial.shape = {4, 2, 1 << 18};
  trial.shards.assign(comm->size(), 0);
  trial.shards[0] = 1;
  trial.shards.back() += 3;
  trial.dtype = trial.parameter_dtype = torch::kFloat;
  trial.offset = 30;
  run(trial, comm, 6);
}

TEST(SyncBatchNorm, BuffersStayEqualOverManyUnevenSteps) {
  const auto comm = new_world();
  SyncBatchNorm module(SyncBatchNormOptions(6).communicator(comm));
  std::mt19937 generator(11);
  std::mt19937 own(100 + comm->rank());
  for (int step = 0; step < 100; ++step) {
    const auto sizes = testing::random_shards(5, comm->size(), generator);
    torch::manual_seed(step * 17 + comm->rank());
    module->forward(torch::randn({sizes[comm->rank()], 6, 3, 3}) * (1 + comm->rank()))
        .sum()
        .backward();
  }
  EXPECT_TRUE(bit_equal_across(*comm, module->running_mean));
  EXPECT_TRUE(bit_equal_across(*comm, module->running_var));
  EXPECT_EQ(module->num_batches_tracked.item<int64_t>(), 100);
}

TEST(SyncBatchNorm, RepeatedRunsGiveTheSameBits) {
  const auto comm = new_world();
  std::vector<torch::Tensor> results;
  for (int repeat = 0; repeat < 2; ++repeat) {
    torch::manual_seed(3 + comm->rank());
    SyncBatchNorm module(SyncBatchNormOptions(33).communicator(comm));
    auto x = torch::randn({3, 33, 17, 5}).set_requires_grad(true);
    const auto y = module->forward(x);
    y.backward(torch::randn_like(y));
    const std::vector<torch::Tensor> bits = {y, x.grad(), module->weight.grad(),
                                             module->bias.grad(), module->running_var};
    if (repeat == 0) results = bits;
    for (size_t i = 0; i < bits.size(); ++i) EXPECT_TRUE(torch::equal(bits[i], results[i])) << i;
  }
}

}  // namespace
}  // namespace syncnorm
