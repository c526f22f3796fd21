// The MPI and self backends, on sums that are exact, so that every comparison is of bits.
#include "syncnorm/communicator.h"

#include <gtest/gtest.h>

#include <numeric>

#include "comm/mpi_limits.h"
#include "support/world.h"
#include "syncnorm/environment.h"

namespace syncnorm {
namespace {

using testing::message_of;
using testing::new_world;

constexpr torch::ScalarType kReducible[] = {torch::kDouble,   torch::kFloat, torch::kHalf,
                                            torch::kBFloat16, torch::kLong,  torch::kInt,
                                            torch::kShort,    torch::kChar,  torch::kByte};

/// rank r contributes r + i; small integers are exact in every dtype.
torch::Tensor contribution(int rank, int64_t n, torch::ScalarType dtype) {
  return (torch::arange(n) % 7 + rank).to(dtype);
}

torch::Tensor expected_sum(int ranks, int64_t n, torch::ScalarType dtype) {
  return ((torch::arange(n) % 7) * ranks + ranks * (ranks - 1) / 2).to(dtype);
}

class CommunicatorTest : public ::testing::Test {
 protected:
  std::shared_ptr<Communicator> comm = new_world();
  int rank = comm->rank();
  int size = comm->size();

  std::vector<int64_t> uneven_sizes() const {
    std::vector<int64_t> sizes(size);
    for (int r = 0; r < size; ++r)
      sizes[r] = (r * 3) % 4;  // 0 3 2 1: a rank without rows among them
    return sizes;
  }
};

TEST_F(CommunicatorTest, AllReduceSumsEveryDtypeAndSize) {
  for (const auto dtype : kReducible) {
    for (const int64_t n : {0, 1, 7, 1000, 40000}) {
      auto tensor = contribution(rank, n, dtype);
      comm->all_reduce(tensor);
      EXPECT_TRUE(torch::equal(tensor, expected_sum(size, n, dtype))) << dtype << " x " << n;
    }
  }
  EXPECT_EQ(comm->counters().all_reduce, 9 * 5);
}

TEST_F(CommunicatorTest, HalfIsSummedInFloat) {
  // In half, 2048 + 1 is 2048: adding ones one after the other would lose them all.
  auto tensor = torch::full({4}, rank == 0 ? 2048.0 : 0.75, torch::kHalf);
  comm->all_reduce(tensor);
  EXPECT_TRUE(torch::equal(
      tensor, torch::full({4}, 2048.0 + 0.75 * (size - 1), torch::kFloat).to(torch::kHalf)));
}

TEST_F(CommunicatorTest, AllReduceMaxAndMin) {
  auto top = torch::tensor({rank, -rank});
  comm->all_reduce(top, ReduceOp::max);
  EXPECT_TRUE(torch::equal(top, torch::tensor({size - 1, 0})));
  auto bottom = torch::tensor({rank, -rank});
  comm->all_reduce(bottom, ReduceOp::min);
  EXPECT_TRUE(torch::equal(bottom, torch::tensor({0, 1 - size})));
}

TEST_F(CommunicatorTest, WorksInPlaceOnViewsAndLeavesTheRestAlone) {
  auto base = torch::zeros({6, 4});
  auto view = base.slice(1, 1, 3);
  view.fill_(rank + 1);
  comm->all_reduce(view);
  EXPECT_EQ(base.sum().item<double>(), 12.0 * size * (size + 1) / 2);
  EXPECT_EQ(base.select(1, 0).abs().sum().item<double>(), 0);
  auto parameter = torch::full({3}, double(rank)).set_requires_grad(true);
  comm->broadcast(parameter, size - 1);
  EXPECT_TRUE(torch::equal(parameter, torch::full({3}, double(size - 1))));
}

/// Results are copied back to where autograd or inference mode would mind an ordinary write.
TEST_F(CommunicatorTest, AllReducesLeavesAndTensorsOfInferenceMode) {
  auto leaf = torch::full({2, 3}, 1.0F).requires_grad_();
  comm->all_reduce(leaf);
  comm->all_reduce(leaf.t());
  EXPECT_TRUE(torch::equal(leaf.detach(), torch::full({2, 3}, float(size) * float(size))));
  torch::Tensor made, half;
  {
    const c10::InferenceMode inference;
    made = torch::ones({4, 5});
    half = torch::ones({4}, torch::kHalf);
  }
  comm->all_reduce(made.t());
  comm->all_reduce(half);
  EXPECT_TRUE(torch::equal(made, torch::full({4, 5}, float(size))));
  EXPECT_TRUE(torch::equal(half, torch::full({4}, float(size), torch::kHalf)));
}

TEST_F(CommunicatorTest, AllGatherJoinsUnevenShards) {
  const auto sizes = uneven_sizes();
  for (const auto dtype : {torch::kDouble, torch::kHalf, torch::kBool, torch::kLong}) {
    const auto mine = torch::full({sizes[rank], 2, 3}, rank % 2).to(dtype);
    const auto all = comm->all_gather(mine, sizes);
    std::vector<torch::Tensor> parts;
    for (int r = 0; r < size; ++r) parts.push_back(torch::full({sizes[r], 2, 3}, r % 2).to(dtype));
    EXPECT_TRUE(torch::equal(all, torch::cat(parts))) << dtype;
  }
}

TEST_F(CommunicatorTest, ReduceScatterSumsAndCuts) {
  const auto sizes = uneven_sizes();
  const auto total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const auto start = std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
  for (const auto dtype : {torch::kDouble, torch::kBFloat16, torch::kInt}) {
    const auto mine = contribution(rank, total * 5, dtype).view({total, 5});
    const auto part = comm->reduce_scatter(mine, sizes);
    EXPECT_TRUE(torch::equal(
        part, expected_sum(size, total * 5, dtype).view({total, 5}).narrow(0, start, sizes[rank])));
    EXPECT_TRUE(torch::equal(mine, contribution(rank, total * 5, dtype).view({total, 5})));
  }
}

TEST_F(CommunicatorTest, BroadcastFromEveryRoot) {
  for (int root = 0; root < size; ++root) {
    auto tensor = torch::full({2, 2}, rank * 10.0).t();
    comm->broadcast(tensor, root);
    EXPECT_TRUE(torch::equal(tensor, torch::full({2, 2}, root * 10.0)));
  }
  auto large = torch::full({50000}, double(rank));
  comm->broadcast(large, 0);
  EXPECT_EQ(large.sum().item<double>(), 0);
}

TEST_F(CommunicatorTest, CountsBeyondTheLimitAreSplit) {
  for (const int64_t limit : {1, 7, 1000}) {
    const auto old = set_max_count(limit);
    auto tensor = contribution(rank, 100, torch::kDouble);
    comm->all_reduce(tensor);
    EXPECT_TRUE(torch::equal(tensor, expected_sum(size, 100, torch::kDouble)));
    auto sent = torch::full({25}, double(rank));
    comm->broadcast(sent, size - 1);
    EXPECT_TRUE(torch::equal(sent, torch::full({25}, double(size - 1))));
    const auto sizes = uneven_sizes();
    const auto all = comm->all_gather(torch::full({sizes[rank], 3}, double(rank)), sizes);
    const auto total = all.size(0);
    double expected = 0;
    for (int r = 0; r < size; ++r) expected += 3.0 * static_cast<double>(sizes[r]) * r;
    EXPECT_EQ(all.sum().item<double>(), expected);
    const auto part = comm->reduce_scatter(torch::ones({total, 3}), sizes);
    EXPECT_TRUE(torch::equal(part, torch::full({sizes[rank], 3}, double(size))));
    set_max_count(old);
  }
}

TEST_F(CommunicatorTest, SplitMakesOrderedGroups) {
  const auto half = comm->split(rank % 2, -rank);  // keys reverse the order
  ASSERT_NE(half, nullptr);
  EXPECT_EQ(half->size(), (size + 1 - rank % 2) / 2);
  EXPECT_EQ(half->rank(), half->size() - 1 - rank / 2);
  auto one = torch::ones({1});
  half->all_reduce(one);
  EXPECT_EQ(one.item<double>(), half->size());
  EXPECT_EQ(half->counters().all_reduce, 1);
  EXPECT_EQ(comm->counters().collectives(), 0);
  const auto only_first = comm->split(rank == 0 ? 3 : -1, 0);
  EXPECT_EQ(only_first != nullptr, rank == 0);
}

TEST_F(CommunicatorTest, CountsCollectivesAndBytes) {
  comm->all_reduce(torch::zeros({10}, torch::kDouble));
  comm->broadcast(torch::zeros({3}, torch::kFloat), 0);
  comm->barrier();
  EXPECT_EQ(comm->counters().collectives(), 3);
  EXPECT_EQ(comm->counters().bytes, 92);
  EXPECT_EQ(comm->sequence(), 3U);
  comm->reset_counters();
  EXPECT_EQ(comm->counters().collectives(), 0);
}

TEST_F(CommunicatorTest, BadArgumentsRaiseBeforeCommunicating) {
  const auto expect = [](const std::string& message, const char* words) {
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  expect(message_of<c10::Error>([&] { comm->all_reduce(torch::Tensor()); }), "undefined");
  expect(message_of<c10::Error>([&] { comm->all_reduce(torch::ones({2}, torch::kBool)); }),
         "cannot reduce");
  expect(message_of<c10::Error>([&] { comm->all_reduce(torch::ones({2}, torch::kComplexFloat)); }),
         "cannot reduce");
  expect(message_of<c10::Error>([&] { comm->broadcast(torch::ones({2}), size); }), "not a rank");
  expect(message_of<c10::Error>([&] { comm->all_gather(torch::ones({2}), testing::ones(size)); }),
         "announced 1 rows");
  expect(
      message_of<c10::Error>([&] { comm->all_gather(torch::ones({1}), testing::ones(size + 1)); }),
      "one size for each");
  expect(message_of<c10::Error>(
             [&] { comm->reduce_scatter(torch::ones({size + 1}), testing::ones(size)); }),
         "add up to");
  EXPECT_EQ(comm->counters().collectives(), 0);
}

TEST(Communicator, SelfCountsWithoutMoving) {
  const auto self = self_communicator();
  auto tensor = torch::arange(4);
  self->all_reduce(tensor);
  EXPECT_TRUE(torch::equal(tensor, torch::arange(4)));
  EXPECT_TRUE(torch::equal(self->all_gather(tensor, {4}), tensor));
  EXPECT_TRUE(torch::equal(self->reduce_scatter(tensor, {4}), tensor));
  EXPECT_EQ(self->counters().collectives(), 3);
  EXPECT_EQ(self->split(-1, 0), nullptr);
}

TEST(Environment, KnowsTheNodeAndRefusesASecondOne) {
  auto* environment = Environment::current();
  ASSERT_NE(environment, nullptr);
  EXPECT_GE(environment->local_size(), 1);
  EXPECT_LT(environment->local_rank(), environment->local_size());
  EXPECT_TRUE(environment->device().is_cpu() || environment->device().is_cuda());
  EXPECT_THROW(Environment second, c10::Error);
}

}  // namespace
}  // namespace syncnorm
