#include "syncnorm/sampler.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

#include "support/world.h"

namespace syncnorm {
namespace {

using Indices = std::vector<int64_t>;

Indices sorted(Indices indices) {
  std::sort(indices.begin(), indices.end());
  return indices;
}

Indices all_of(int64_t count) {
  Indices result(count);
  std::iota(result.begin(), result.end(), 0);
  return result;
}

/// The samples of all ranks in `step`, in rank order; checks that shards are balanced.
Indices global_batch(int64_t samples, int64_t batch, int size, int64_t epoch, int64_t step,
                     bool shuffle = true) {
  Indices joined;
  size_t shortest = samples;
  size_t longest = 0;
  for (int rank = 0; rank < size; ++rank) {
    DistributedBatchSampler sampler(samples, batch, rank, size, shuffle, /*seed=*/7);
    sampler.set_epoch(epoch);
    const auto mine = sampler.batch(step);
    joined.insert(joined.end(), mine.indices.begin(), mine.indices.end());
    shortest = std::min(shortest, mine.indices.size());
    longest = std::max(longest, mine.indices.size());
    EXPECT_EQ(mine.global_size, std::min(batch, samples - step * batch));
  }
  EXPECT_LE(longest - shortest, 1u);
  return joined;
}

TEST(DistributedBatchSampler, SeesEverySampleOnceAnEpoch) {
  for (const int size : {1, 2, 3, 4, 7}) {
    for (const auto& [samples, batch] : std::vector<std::pair<int64_t, int64_t>>{
             {23, 4}, {24, 4}, {5, 8}, {1, 1}, {100, 7}, {0, 3}}) {
      const DistributedBatchSampler sampler(samples, batch, 0, size);
      EXPECT_EQ(sampler.steps(), (samples + batch - 1) / batch);
      Indices seen;
      for (int64_t step = 0; step < sampler.steps(); ++step) {
        const auto joined = global_batch(samples, batch, size, /*epoch=*/0, step);
        seen.insert(seen.end(), joined.begin(), joined.end());
      }
      EXPECT_EQ(sorted(seen), all_of(samples)) << size << " ranks, " << samples << " samples";
    }
  }
}

TEST(DistributedBatchSampler, OrderDoesNotDependOnTheNumberOfRanks) {
  for (int64_t step = 0; step < 4; ++step) {
    const auto alone = global_batch(23, 6, 1, /*epoch=*/2, step);
    for (const int size : {2, 3, 5}) EXPECT_EQ(global_batch(23, 6, size, 2, step), alone);
  }
}

TEST(DistributedBatchSampler, LastShortBatchLeavesRanksEmptyButInStep) {
  // 9 samples, 8 a step, on 4 ranks: the second step has one sample.
  for (int rank = 0; rank < 4; ++rank) {
    const DistributedBatchSampler sampler(9, 8, rank, 4);
    ASSERT_EQ(sampler.steps(), 2);
    const auto last = sampler.batch(1);
    EXPECT_EQ(last.indices.size(), rank == 0 ? 1u : 0u);
    EXPECT_EQ(last.global_size, 1);
  }
}

TEST(DistributedBatchSampler, DropsTheShortBatchWhenAsked) {
  const DistributedBatchSampler sampler(9, 8, 0, 2, true, 0, /*drop_last=*/true);
  EXPECT_EQ(sampler.steps(), 1);
  EXPECT_EQ(sampler.batch(0).global_size, 8);
  EXPECT_THROW(sampler.batch(1), c10::Error);
  EXPECT_EQ(DistributedBatchSampler(7, 8, 0, 2, true, 0, true).steps(), 0);
}

TEST(DistributedBatchSampler, EpochsAndSeedsShuffleDifferently) {
  const auto first = global_batch(64, 64, 1, 0, 0);
  EXPECT_NE(first, all_of(64));
  EXPECT_NE(first, global_batch(64, 64, 1, 1, 0));
  EXPECT_EQ(first, global_batch(64, 64, 1, 0, 0));
  const auto other = DistributedBatchSampler(64, 64, 0, 1, true, /*seed=*/8).batch(0).indices;
  EXPECT_NE(first, other);
  EXPECT_EQ(global_batch(64, 64, 1, 5, 0, /*shuffle=*/false), all_of(64));
}

TEST(DistributedBatchSampler, ShufflesUniformly) {
  // Where sample 0 of 5 lands over many epochs: 2000 a place, standard deviation 40.
  std::vector<int> places(5, 0);
  DistributedBatchSampler sampler(5, 5, 0, 1, true, /*seed=*/3);
  for (int64_t epoch = 0; epoch < 10000; ++epoch) {
    sampler.set_epoch(epoch);
    const auto order = sampler.batch(0).indices;
    ++places[std::find(order.begin(), order.end(), 0) - order.begin()];
  }
  for (const int count : places) EXPECT_NEAR(count, 2000, 200);
}

TEST(DistributedBatchSampler, RefusesNonsense) {
  EXPECT_THROW(DistributedBatchSampler(-1, 4, 0, 1), c10::Error);
  EXPECT_THROW(DistributedBatchSampler(8, 0, 0, 1), c10::Error);
  EXPECT_THROW(DistributedBatchSampler(8, 4, 2, 2), c10::Error);
  EXPECT_THROW(DistributedBatchSampler(8, 4, -1, 2), c10::Error);
  DistributedBatchSampler sampler(8, 4, 0, 1);
  EXPECT_THROW(sampler.batch(2), c10::Error);
  EXPECT_THROW(sampler.batch(-1), c10::Error);
  EXPECT_THROW(sampler.set_epoch(-1), c10::Error);
}

TEST(DistributedBatchSampler, AgreesBetweenProcesses) {
  const auto world = testing::new_world();
  DistributedBatchSampler sampler(31, 31, 0, 1, true, 11);
  sampler.set_epoch(3);
  const auto order = torch::tensor(sampler.batch(0).indices, torch::kInt64);
  EXPECT_TRUE(testing::bit_equal_across(*world, order));
}

}  // namespace
}  // namespace syncnorm
