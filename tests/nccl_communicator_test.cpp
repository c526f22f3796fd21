// The NCCL backend over a fake NCCL and CUDA runtime in host memory, on sums that are exact: what
// it moves and the calls it makes. What only a GPU can show is in tests/gpu.
#include <gtest/gtest.h>

#include <numeric>

#include "comm/statistics_buffer.h"
#include "support/nccl_test.h"

namespace syncnorm {
namespace {

using testing::expect_words;
using testing::message_of;

class NcclCommunicatorTest : public testing::NcclTest {};

TEST_F(NcclCommunicatorTest, AllReduceOfEveryDtypeAndSize) {
  comm = make();
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16,
                           torch::kLong, torch::kInt, torch::kShort, torch::kChar, torch::kByte}) {
    for (const int64_t n : {0, 1, 7, 1000}) {
      auto tensor = contribution(rank, n, dtype);
      comm->all_reduce(tensor);
      EXPECT_TRUE(torch::equal(tensor, expected_sum(n, dtype))) << dtype << " x " << n;
    }
    auto top = torch::tensor({rank + 1, 3}).to(dtype);
    comm->all_reduce(top, ReduceOp::max);
    EXPECT_TRUE(torch::equal(top, torch::tensor({size, 3}).to(dtype))) << dtype;
    auto bottom = torch::tensor({rank + 1, 3}).to(dtype);
    comm->all_reduce(bottom, ReduceOp::min);
    EXPECT_TRUE(torch::equal(bottom, torch::tensor({1, 3}).to(dtype))) << dtype;
  }
  EXPECT_EQ(comm->counters().all_reduce, 9 * 6);
}

TEST_F(NcclCommunicatorTest, AllGatherJoinsEvenUnevenAndEmptyShards) {
  comm = make();
  const std::vector<std::vector<int64_t>> layouts = {uneven_sizes(), std::vector<int64_t>(size, 2),
                                                     std::vector<int64_t>(size, 0)};
  for (const auto& sizes : layouts) {
    for (const auto dtype : {torch::kDouble, torch::kHalf, torch::kBool, torch::kComplexFloat}) {
      const auto mine = torch::full({sizes[rank], 2, 3}, rank % 2).to(dtype);
      std::vector<torch::Tensor> parts;
      for (int r = 0; r < size; ++r)
        parts.push_back(torch::full({sizes[r], 2, 3}, r % 2).to(dtype));
      const auto all = comm->all_gather(mine, sizes);
      EXPECT_TRUE(torch::equal(all, torch::cat(parts))) << dtype << " " << sizes;
    }
  }
}

TEST_F(NcclCommunicatorTest, ReduceScatterSumsAndCuts) {
  comm = make();
  const std::vector<std::vector<int64_t>> layouts = {uneven_sizes(), std::vector<int64_t>(size, 2),
                                                     std::vector<int64_t>(size, 0)};
  for (const auto& sizes : layouts) {
    const auto total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    const auto start = std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
    for (const auto dtype : {torch::kDouble, torch::kBFloat16, torch::kShort}) {
      const auto mine = contribution(rank, total * 5, dtype).view({total, 5});
      const auto part = comm->reduce_scatter(mine, sizes);
      const auto whole = expected_sum(total * 5, dtype).view({total, 5});
      EXPECT_TRUE(torch::equal(part, whole.narrow(0, start, sizes[rank]))) << dtype << sizes;
      EXPECT_TRUE(torch::equal(mine, contribution(rank, total * 5, dtype).view({total, 5})));
    }
  }
}

TEST_F(NcclCommunicatorTest, BroadcastFromEveryRootIntoAnyView) {
  comm = make();
  for (int root = 0; root < size; ++root) {
    auto tensor = torch::full({2, 3}, rank * 10.0).t();
    comm->broadcast(tensor, root);
    EXPECT_TRUE(torch::equal(tensor, torch::full({3, 2}, root * 10.0)));
  }
  comm->broadcast(torch::empty({0}), 0);
}

TEST_F(NcclCommunicatorTest, SplitMakesOrderedGroups) {
  comm = make();
  EXPECT_EQ(comm->name(), "world/nccl");
  const auto half = comm->split(rank % 2, -rank);  // keys reverse the order
  ASSERT_NE(half, nullptr);
  EXPECT_EQ(half->name(), "world/nccl/split(" + std::to_string(rank % 2) + ")");
  EXPECT_EQ(half->size(), (size + 1 - rank % 2) / 2);
  EXPECT_EQ(half->rank(), half->size() - 1 - rank / 2);
  auto one = torch::ones({1});
  half->all_reduce(one);
  EXPECT_EQ(one.item<double>(), half->size());
  half->barrier();
  EXPECT_EQ(half->counters().collectives(), 2);
  EXPECT_EQ(comm->counters().collectives(), 0);
  const auto only_first = comm->split(rank == 0 ? 3 : -1, 0);
  EXPECT_EQ(only_first != nullptr, rank == 0);
  EXPECT_EQ(fake.created, rank == 0 ? 3 : 2);
}

TEST_F(NcclCommunicatorTest, QueuesOneCallWhereOneIsEnough) {
  comm = make();
  fake.take_calls();
  const auto tensor = torch::zeros({6});
  comm->all_reduce(tensor);
  EXPECT_EQ(fake.take_calls(), (std::vector<std::string>{"all_reduce Float x6", "event_record"}));
  comm->all_gather(tensor, std::vector<int64_t>(size, 6));
  EXPECT_EQ(fake.take_calls(), (std::vector<std::string>{"all_gather Byte x24", "event_record"}));
  comm->reduce_scatter(torch::zeros({2 * size, 3}), std::vector<int64_t>(size, 2));
  EXPECT_EQ(fake.take_calls(),
            (std::vector<std::string>{"reduce_scatter Float x6", "event_record"}));
  comm->all_reduce(torch::zeros({0}));
  EXPECT_EQ(fake.take_calls(), (std::vector<std::string>{"event_record"}));
}

TEST_F(NcclCommunicatorTest, GroupsWhatTakesSeveralCalls) {
  if (size != 4) GTEST_SKIP() << "written for four ranks";
  comm = make();
  fake.take_calls();
  const auto sizes = uneven_sizes();
  comm->all_gather(torch::zeros({sizes[rank], 2}), sizes);
  EXPECT_EQ(fake.take_calls(),
            (std::vector<std::string>{"group_start", "broadcast Byte x16 from 0",
                                      "broadcast Byte x8 from 1", "broadcast Byte x24 from 3",
                                      "group_end", "event_record"}));
  comm->reduce_scatter(torch::zeros({6, 2}, torch::kDouble), sizes);
  EXPECT_EQ(fake.take_calls(), (std::vector<std::string>{
                                   "group_start", "reduce Double x4 to 0", "reduce Double x2 to 1",
                                   "reduce Double x6 to 3", "group_end", "event_record"}));
}

TEST_F(NcclCommunicatorTest, WaitsWhileNcclIsStillStarting) {
  comm = make();
  fake.polls = 5;
  auto tensor = torch::ones({3});
  comm->all_reduce(tensor);
  comm->all_gather(torch::ones({uneven_sizes()[rank]}), uneven_sizes());
  comm->barrier();
  EXPECT_TRUE(torch::equal(tensor, torch::full({3}, double(size))));
}

TEST_F(NcclCommunicatorTest, CountsCollectivesAndBytes) {
  comm = make();
  comm->all_reduce(torch::zeros({10}, torch::kDouble));
  comm->broadcast(torch::zeros({3}), 0);
  comm->barrier();
  EXPECT_EQ(comm->counters().collectives(), 3);
  EXPECT_EQ(comm->counters().bytes, 92);
  EXPECT_EQ(comm->sequence(), 3U);
  EXPECT_EQ(world->counters().collectives(), 0);
}

TEST_F(NcclCommunicatorTest, HostTensorsGoByTheBootstrapCommunicator) {
  comm = make(60, c10::Device(torch::kCUDA, 0));
  fake.take_calls();
  auto tensor = contribution(rank, 5, torch::kHalf);
  comm->all_reduce(tensor);
  EXPECT_TRUE(torch::equal(tensor, expected_sum(5, torch::kHalf)));
  const auto sizes = uneven_sizes();
  EXPECT_EQ(comm->all_gather(torch::ones({sizes[rank]}), sizes).size(0),
            std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
  EXPECT_TRUE(torch::equal(comm->reduce_scatter(torch::ones({size}), testing::ones(size)),
                           torch::full({1}, double(size))));
  auto sent = torch::full({2}, double(rank));
  comm->broadcast(sent, size - 1);
  EXPECT_TRUE(torch::equal(sent, torch::full({2}, size - 1.0)));
  EXPECT_EQ(comm->counters().collectives(), 4);
  EXPECT_TRUE(fake.take_calls().empty());
  EXPECT_THROW(comm->all_reduce(torch::ones({2}, torch::kMeta)), c10::Error);
}

TEST_F(NcclCommunicatorTest, CapturedOperationsAreNotWatched) {
  comm = make();
  fake.take_calls();
  fake.capturing = true;
  comm->all_reduce(torch::zeros({2}));
  EXPECT_EQ(fake.take_calls(), (std::vector<std::string>{"all_reduce Float x2"}));
  expect_words(message_of<c10::Error>([&] { comm->barrier(); }), {"cannot be captured"});
  fake.capturing = false;
  comm->barrier();
}

TEST_F(NcclCommunicatorTest, DisagreementsAreDescribed) {
  if (size == 1) GTEST_SKIP() << "needs two ranks";
  comm = make();
  const ModuleScope scope("encoder.norm");
  StatisticsBuffer buffer(comm, 4, torch::kCPU);
  buffer.words(0, {4}).zero_();
  expect_words(message_of<CommunicationError>(
                   [&] { buffer.exchange(rank == 1 ? "eps=0.5;" : "eps=1e-05;"); }),
               {"all_reduce #0 of encoder.norm on world/nccl", "eps differs", "rank 1 has 0.5"});
  EXPECT_THROW(comm->barrier(), CommunicationError);
}

}  // namespace
}  // namespace syncnorm
