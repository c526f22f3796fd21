// What a rank hands to collectives does not depend on how many ranks there are: groups of 2, 4, 8
// and 16 ranks compare results with the norm of the whole tensor, and their counters with each
// other. Counters count payload, not what the algorithm of an all-reduce then moves.

#include <torch/torch.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "support/world.h"
#include "syncnorm/sync_batch_norm.h"
#include "syncnorm/tensor_parallel_norm.h"

namespace syncnorm {
namespace {

using testing::new_world;
using testing::relative_difference;
using torch::Tensor;

constexpr int64_t kChannels = 6;
constexpr int64_t kRows = 5;
// Double arithmetic over a few dozen values a slot: some roundings of 1e-16, far below this.
constexpr double kTolerance = 1e-12;

/// Uneven, and every third rank has nothing.
std::vector<int64_t> uneven(int ranks) {
  std::vector<int64_t> sizes;
  for (int r = 0; r < ranks; ++r) sizes.push_back((r + 1) % 3 * 2);
  return sizes;
}

int64_t sum_of(const std::vector<int64_t>& sizes, int count) {
  int64_t sum = 0;
  for (int r = 0; r < count; ++r) sum += sizes[r];
  return sum;
}

struct Case {
  std::string name;
  int64_t dimension;  // the one that is split
  int64_t bytes;      // forward and backward, by the documented wire format
  std::function<Tensor(const Tensor& shard, const std::vector<int64_t>& sizes,
                       const std::shared_ptr<Communicator>&)>
      split;
  std::function<Tensor(const Tensor& whole)> whole;
};

Tensor split_batch_norm(const Tensor& x, const std::vector<int64_t>&,
                        const std::shared_ptr<Communicator>& comm) {
  SyncBatchNorm norm(SyncBatchNormOptions(kChannels).communicator(comm).name("scale.batch"));
  norm->to(torch::kDouble);
  return norm(x);
}

Tensor split_layer_norm(const Tensor& x, const std::vector<int64_t>& sizes,
                        const std::shared_ptr<Communicator>& comm) {
  TensorParallelLayerNorm norm(TensorParallelLayerNormOptions(sum_of(sizes, comm->size()))
                                   .shard_sizes(sizes)
                                   .communicator(comm)
                                   .name("scale.layer"));
  norm->to(torch::kDouble);
  return norm(x);
}

Tensor split_rms_norm(const Tensor& x, const std::vector<int64_t>& sizes,
                      const std::shared_ptr<Communicator>& comm) {
  TensorParallelRMSNorm norm(TensorParallelRMSNormOptions(sum_of(sizes, comm->size()))
                                 .shard_sizes(sizes)
                                 .communicator(comm)
                                 .name("scale.rms"));
  norm->to(torch::kDouble);
  return norm(x);
}

/// Doubles, forward and backward, of a norm that exchanges `words` for all its slots: the buffer
/// has two more for the tag, and two, forward, for count and need of a gradient.
int64_t bytes_of(int64_t words) {
  return ((2 + 2 + words) + (2 + words)) * static_cast<int64_t>(sizeof(double));
}

std::vector<Case> cases() {
  return {{"SyncBatchNorm", 0, bytes_of(2 * kChannels), split_batch_norm,
           [](const Tensor& x) {
             return torch::batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5, false);
           }},
          {"TensorParallelLayerNorm", 1, bytes_of(2 * kRows), split_layer_norm,
           [](const Tensor& x) { return torch::layer_norm(x, {x.size(-1)}); }},
          {"TensorParallelRMSNorm", 1, bytes_of(kRows), split_rms_norm,
           [](const Tensor& x) { return at::rms_norm(x, {x.size(-1)}, {}, 1e-6); }}};
}

/// (collectives, bytes, second exchanges) of forward and backward on this rank of `comm`.
using Counts = std::tuple<int64_t, int64_t, int64_t>;

Counts run(const Case& norm, const std::shared_ptr<Communicator>& comm) {
  const auto sizes = uneven(comm->size());
  const int64_t total = sum_of(sizes, comm->size());
  torch::manual_seed(comm->size());
  const auto shape = norm.dimension == 0 ? std::vector<int64_t>{total, kChannels, 3}
                                         : std::vector<int64_t>{kRows, total};
  const auto whole = torch::randn(shape, torch::kDouble).add_(2).requires_grad_();
  const auto gradient = torch::randn(shape, torch::kDouble);
  const auto mine = [&](const Tensor& t) {
    return t.narrow(norm.dimension, sum_of(sizes, comm->rank()), sizes[comm->rank()]);
  };
  const auto expected = norm.whole(whole);
  expected.backward(gradient);
  auto shard = mine(whole.detach()).clone().requires_grad_();
  comm->reset_counters();
  const auto output = norm.split(shard, sizes, comm);
  output.backward(mine(gradient));
  const auto counters = comm->counters();
  EXPECT_LE(relative_difference(output, mine(expected)), kTolerance);
  EXPECT_LE(relative_difference(shard.grad(), mine(whole.grad())), kTolerance);
  return {counters.collectives(), counters.bytes, counters.second_exchanges};
}

TEST(Scale, CollectivesAndBytesOfARankDoNotGrowWithRanks) {
  const auto world = new_world();
  for (int ranks = 2; ranks <= world->size(); ranks *= 2) {
    const bool member = world->rank() < ranks;
    const auto group = world->split(member ? 0 : -1, world->rank());
    if (!member) continue;
    for (const auto& norm : cases()) {
      SCOPED_TRACE(norm.name + " on " + std::to_string(ranks) + " ranks");
      EXPECT_EQ(run(norm, group), (Counts{2, norm.bytes, 0}));
    }
  }
}

}  // namespace
}  // namespace syncnorm
