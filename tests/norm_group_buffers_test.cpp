// Running statistics of batch norms that share their collectives against those of the same norms
// alone.
#include <gtest/gtest.h>

#include "support/batch.h"
#include "support/world.h"
#include "syncnorm/norm_group.h"
#include "syncnorm/sync_batch_norm.h"

namespace syncnorm {
namespace {

using testing::bit_equal_across;
using testing::new_world;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

/// Batch norms for a group and the same for use alone.
struct Branches {
  explicit Branches(const std::shared_ptr<Communicator>& comm) : ranks(comm->size()) {
    for (const int64_t channels : {4, 1, 6}) {
      const auto options = SyncBatchNormOptions(channels).communicator(comm).momentum(
          channels == 1 ? std::nullopt : std::optional(0.3));
      grouped.emplace_back(options);
      alone.emplace_back(options);
    }
  }
  Tensors inputs(int step, int rank) {
    std::mt19937 generator(step);
    torch::manual_seed(1000 * step + rank);
    Tensors x;
    for (const auto& norm : grouped) {
      const auto samples = testing::random_shards(6, ranks, generator)[rank];
      x.push_back((torch::randn({samples, norm->options.num_features(), 5}) * 3 + rank)
                      .set_requires_grad(true));
    }
    return x;
  }
  int ranks;
  std::vector<SyncBatchNorm> grouped, alone;
};

/// Distance in units in the last place.
int64_t ulps(const Tensor& a, const Tensor& b) {
  return (a.view(torch::kInt) - b.view(torch::kInt)).abs().max().item<int64_t>();
}

TEST(NormGroup, RunningStatisticsAreThoseOfTheNormsAlone) {
  const auto comm = new_world();
  Branches branches(comm);
  NormGroup group({branches.grouped.begin(), branches.grouped.end()});
  for (int step = 0; step < 6; ++step) {
    const auto x = branches.inputs(step, comm->rank());
    comm->reset_counters();
    const auto y = group.forward(x);
    auto loss = torch::zeros({});
    for (const auto& of : y) loss = loss + of.square().sum();
    loss.backward();
    EXPECT_EQ(comm->counters().collectives(), 2);
    const auto bytes = comm->counters().bytes;
    comm->reset_counters();
    for (size_t i = 0; i < x.size(); ++i)
      branches.alone[i]->forward(x[i]).square().sum().backward();
    EXPECT_EQ(comm->counters().collectives(), 6);
    // The tags of two norms forward and two backward are saved.
    EXPECT_EQ(comm->counters().bytes, bytes + 4 * 2 * 8);
  }
  // Two addends have one sum; more are added in an order that MPI may choose by the length of the
  // buffer, which moves a double's last place, and that a float's across a rounding boundary at
  // most.
  const int64_t limit = comm->size() <= 2 ? 0 : 1;
  for (size_t i = 0; i < branches.grouped.size(); ++i) {
    const auto &a = branches.grouped[i], &b = branches.alone[i];
    EXPECT_TRUE(bit_equal_across(*comm, a->running_mean));
    EXPECT_TRUE(bit_equal_across(*comm, a->running_var));
    EXPECT_LE(ulps(a->running_mean, b->running_mean), limit);
    EXPECT_LE(ulps(a->running_var, b->running_var), limit);
    EXPECT_EQ(a->num_batches_tracked.item<int64_t>(), 6);
  }
  const auto before = branches.grouped[0]->running_mean.clone();
  const FreezeRunningStatsGuard freeze;
  group.forward(branches.inputs(9, comm->rank()));
  EXPECT_TRUE(torch::equal(branches.grouped[0]->running_mean, before));
}

}  // namespace
}  // namespace syncnorm
