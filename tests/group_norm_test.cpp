// Group and instance norm with channels or space split, against torch's own on the whole input.
#include "syncnorm/group_norm.h"

#include <gtest/gtest.h>

#include "support/batch.h"
#include "support/tolerance.h"
#include "support/world.h"

namespace syncnorm {
namespace {

using testing::bit_equal_across;
using testing::message_of;
using testing::new_world;
using testing::relative_difference;

// Double: both sides add up to a thousand terms.
double tolerance(torch::ScalarType dtype) { return testing::norm_tolerance(dtype, 1e-11); }

struct Trial {
  std::vector<int64_t> shape;
  int64_t groups = 1;
  Split split = Split::channels;
  std::vector<int64_t> shards;
  torch::ScalarType dtype = torch::kDouble;
  bool affine = true;
  int expected_collectives = 1;
};

torch::Tensor part(const torch::Tensor& whole, int64_t dim, const std::vector<int64_t>& sizes,
                   int rank) {
  int64_t start = 0;
  for (int r = 0; r < rank; ++r) start += sizes[r];
  return whole.narrow(dim, start, sizes[rank]).contiguous().clone();
}

void run(const Trial& trial, const std::shared_ptr<Communicator>& comm) {
  torch::manual_seed(trial.shape[0] * 100 + trial.groups);
  const auto channels = trial.shape[1];
  const int64_t dim = trial.split == Split::channels ? 1 : 2;
  const auto mine = [&](const torch::Tensor& whole) {
    return part(whole, dim, trial.shards, comm->rank());
  };
  const auto whole_x = (torch::randn(trial.shape, torch::kDouble) + 1).to(trial.dtype);
  const auto whole_dy = torch::randn(trial.shape, torch::kDouble).to(trial.dtype);
  auto x64 = whole_x.to(torch::kDouble).clone().set_requires_grad(true);
  auto w64 = torch::randn({channels}, torch::kFloat).to(torch::kDouble).set_requires_grad(true);
  auto b64 = torch::randn({channels}, torch::kFloat).to(torch::kDouble).set_requires_grad(true);
  const auto expected =
      torch::group_norm(x64, trial.groups, trial.affine ? w64 : torch::Tensor(),
                        trial.affine ? b64 : torch::Tensor(), 1e-5, /*cudnn_enabled=*/false);
  expected.backward(whole_dy.to(torch::kDouble));

  auto options = ParallelGroupNormOptions(trial.groups, channels)
                     .affine(trial.affine)
                     .split(trial.split)
                     .communicator(comm)
                     .name("gn");
  if (trial.split == Split::channels) options.shard_sizes(trial.shards);
  ParallelGroupNorm norm(options);
  if (trial.dtype == torch::kDouble) norm->to(torch::kDouble);
  const auto my_channels = [&](const torch::Tensor& whole) {
    return trial.split == Split::channels ? part(whole, 0, trial.shards, comm->rank()) : whole;
  };
  if (trial.affine) {
    const torch::NoGradGuard no_grad;
    norm->weight.copy_(my_channels(w64));
    norm->bias.copy_(my_channels(b64));
  }
  auto x = mine(whole_x).set_requires_grad(true);
  comm->reset_counters();
  const auto y = norm(x);
  EXPECT_EQ(comm->counters().collectives(),
            trial.expected_collectives + comm->counters().second_exchanges);
  comm->reset_counters();
  y.backward(mine(whole_dy));
  EXPECT_EQ(comm->counters().collectives(), trial.expected_collectives);

  const double near = tolerance(trial.dtype);
  EXPECT_EQ(y.scalar_type(), trial.dtype);
  EXPECT_LT(relative_difference(y, mine(expected)), near);
  EXPECT_LT(relative_difference(x.grad(), mine(x64.grad())), near);
  if (!trial.affine) return;
  const double sums_near = std::min(near, 16 * 0x1p-24);
  EXPECT_LT(relative_difference(norm->weight.grad(), my_channels(w64.grad())), sums_near);
  EXPECT_LT(relative_difference(norm->bias.grad(), my_channels(b64.grad())), sums_near);
  if (trial.split == Split::space) {
    EXPECT_TRUE(bit_equal_across(*comm, norm->weight.grad()));
  }
}

TEST(ParallelGroupNorm, ChannelsSplitWithGroupsThatStraddle) {
  const auto comm = new_world();
  std::mt19937 generator(5);
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kHalf})
    for (const int64_t groups : {1, 2, 3}) {
      Trial trial;
      trial.shape = {3, 12, 5, 2};
      trial.groups = groups;
      trial.dtype = dtype;
      // The first rank holds one channel, so a group of four or more straddles unless it is alone.
      trial.shards = testing::random_shards(11, comm->size(), generator);
      ++trial.shards[0];
      if (trial.shards[0] % (12 / groups) == 0 && comm->size() > 1) {
        --trial.shards[0];
        ++trial.shards[1];
      }
      trial.expected_collectives = comm->size() == 1 ? 0 : 1;
      run(trial, comm);
    }
}

TEST(ParallelGroupNorm, NoCollectiveWhereEveryGroupLiesOnOneRank) {
  const auto comm = new_world();
  Trial trial;
  trial.shape = {2, 24, 7};
  trial.groups = 12;
  trial.expected_collectives = 0;
  for (const int64_t size : balanced_shards(12, comm->size())) trial.shards.push_back(2 * size);
  run(trial, comm);
  trial.groups = 24;  // instance norm
  trial.affine = false;
  trial.shards.assign(comm->size(), 0);
  trial.shards.back() = 24;
  run(trial, comm);
}

TEST(ParallelGroupNorm, SpaceSplitUnevenlySomeRanksEmpty) {
  const auto comm = new_world();
  std::mt19937 generator(6);
  for (const auto dtype : {torch::kDouble, torch::kFloat})
    for (const int64_t groups : {2, 6})
      for (const bool affine : {true, false}) {
        Trial trial;
        trial.shape = {2, 6, 9, 4};
        trial.groups = groups;
        trial.split = Split::space;
        trial.dtype = dtype;
        trial.affine = affine;
        trial.shards = testing::random_shards(9, comm->size(), generator);
        run(trial, comm);
      }
}

TEST(ParallelGroupNorm, KeepsDigitsFarFromZero) {
  if (!testing::host_waits()) GTEST_SKIP() << "no second exchange";
  const auto comm = new_world();
  torch::manual_seed(1);
  const auto sizes = balanced_shards(10, comm->size());
  const auto whole = torch::randn({2, 4, 10}) + 1e6;
  const auto expected = torch::group_norm(whole.to(torch::kDouble), 2, {}, {}, 1e-5, false);
  ParallelGroupNorm norm(
      ParallelGroupNormOptions(2, 4).affine(false).split(Split::space).communicator(comm));
  const auto y = norm(part(whole, 2, sizes, comm->rank()));
  EXPECT_LT(relative_difference(y, part(expected, 2, sizes, comm->rank())), 16 * 0x1p-24);
}

TEST(ParallelGroupNorm, SecondDerivativesEqualTorchs) {
  const auto comm = new_world();
  for (const auto split : {Split::channels, Split::space}) {
    torch::manual_seed(2);
    const auto sizes = balanced_shards(6, comm->size());
    const int64_t dim = split == Split::channels ? 1 : 2;
    const auto mine = [&](const torch::Tensor& whole) {
      return part(whole, dim, sizes, comm->rank());
    };
    auto whole = torch::randn({2, 6, 6}, torch::kDouble).set_requires_grad(true);
    const auto dy = torch::randn({2, 6, 6}, torch::kDouble);
    const auto first = torch::autograd::grad({torch::group_norm(whole, 2, {}, {}, 1e-5, false)},
                                             {whole}, {dy}, true, true)[0];
    first.square().sum().backward();

    ParallelGroupNorm norm(
        ParallelGroupNormOptions(2, 6).affine(false).split(split).communicator(comm));
    auto x = mine(whole.detach()).set_requires_grad(true);
    const auto ours = torch::autograd::grad({norm(x)}, {x}, {mine(dy)}, true, true)[0];
    ours.square().sum().backward();
    EXPECT_LT(relative_difference(x.grad(), mine(whole.grad())), 1e-11);
  }
}

TEST(ParallelGroupNorm, RefusesWhatDoesNotFit) {
  const auto comm = new_world();
  const auto says = [&](const std::string& expected, auto&& body) {
    const auto message = message_of<c10::Error>(body);
    EXPECT_NE(message.find(expected), std::string::npos) << message;
  };
  says("positive multiple of num_groups",
       [&] { ParallelGroupNorm(ParallelGroupNormOptions(5, 12).communicator(comm)); });
  says("add up to", [&] {
    ParallelGroupNorm(ParallelGroupNormOptions(4, 12).communicator(comm).shard_sizes(
        std::vector<int64_t>(comm->size(), 13)));
  });
  says("space that is split", [&] {
    ParallelGroupNorm(ParallelGroupNormOptions(4, 12)
                          .communicator(comm)
                          .split(Split::space)
                          .shard_sizes(std::vector<int64_t>(comm->size(), 1)));
  });
  ParallelGroupNorm norm(ParallelGroupNormOptions(4, 12).communicator(comm));
  says("expected an input [N, ", [&] { norm(torch::randn({2, 13, 3})); });
  EXPECT_EQ(comm->counters().collectives(), 0);
}

}  // namespace
}  // namespace syncnorm
