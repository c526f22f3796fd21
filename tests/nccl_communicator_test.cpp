// The NCCL backend over a fake NCCL and CUDA runtime in host memory, on sums that are exact: what
// it moves, the calls it makes, and what becomes of failures. What only a GPU can show is in
// tests/gpu.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <numeric>
#include <thread>

#include "comm/nccl/communicator.h"
#include "comm/statistics_buffer.h"
#include "comm/timeout.h"
#include "support/fake_nccl.h"
#include "support/world.h"
#include "syncnorm/nccl.h"

namespace syncnorm {
namespace {

using testing::FakeNccl;
using testing::message_of;
using testing::new_world;

constexpr double kSoon = 1;  // seconds, for operations that are to time out

bool full_checks() {
  const char* value = std::getenv("SYNCNORM_CHECK");
  return value != nullptr && std::string(value) == "full";
}

void expect_words(const std::string& message, const std::vector<std::string>& words) {
  for (const auto& word : words)
    EXPECT_NE(message.find(word), std::string::npos) << "no '" << word << "' in: " << message;
}

class NcclCommunicatorTest : public ::testing::Test {
 protected:
  std::shared_ptr<Communicator> make(double timeout = 60, c10::Device device = torch::kCPU) {
    return nccl::make_communicator(fake.backend(timeout), world, device);
  }

  void TearDown() override {
    comm.reset();
    EXPECT_EQ(fake.created, fake.destroyed + fake.aborted);
    EXPECT_EQ(fake.events_created, fake.events_destroyed);
    EXPECT_EQ(fake.misuses, 0);
    EXPECT_FALSE(operation_abandoned());
  }

  /// Waits until the watching thread has aborted; the job goes on, as no other test's would.
  void wait_for_abort() {
    for (int i = 0; fake.aborted == 0 && i < 3000; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    ASSERT_EQ(fake.aborted, 1);
  }

  /// A failure ends the job unless somebody says that it does not.
  void forgive() {
    EXPECT_TRUE(operation_abandoned());
    note_late_completion();
  }

  std::vector<int64_t> uneven_sizes() const {
    std::vector<int64_t> sizes(size);
    for (int r = 0; r < size; ++r) sizes[r] = (r * 3 + 2) % 4;  // 2 1 0 3: one without rows
    return sizes;
  }

  /// rank r contributes r + i; small integers are exact in every dtype.
  static torch::Tensor contribution(int r, int64_t n, torch::ScalarType dtype) {
    return (torch::arange(n) % 7 + r).to(dtype);
  }
  torch::Tensor expected_sum(int64_t n, torch::ScalarType dtype) const {
    return ((torch::arange(n) % 7) * size + size * (size - 1) / 2).to(dtype);
  }

  FakeNccl& fake = FakeNccl::renew();
  std::shared_ptr<Communicator> world = new_world();
  int rank = world->rank();
  int size = world->size();
  std::shared_ptr<Communicator> comm;
};

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

class NcclStartTest : public NcclCommunicatorTest {};

TEST_F(NcclStartTest, TwoRanksOnOneGpuFallBackTogether) {
  if (size == 1) GTEST_SKIP() << "needs two ranks";
  if (rank == 0) fake.gpu = "0000:01:00.0";  // rank 1's
  ::testing::internal::CaptureStderr();
  comm = make();
  const auto text = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(comm->name(), "world/split(0)");
  EXPECT_EQ(fake.created, 0);
  if (rank == 0) {
    expect_words(text, {"ranks 0 and 1 share the GPU 0000:01:00.0", "world/nccl", "without NCCL"});
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
  } else {
    EXPECT_EQ(text, "");
  }
  auto tensor = torch::ones({3});
  comm->all_reduce(tensor);
  EXPECT_TRUE(torch::equal(tensor, torch::full({3}, double(size))));
}

TEST_F(NcclStartTest, MissingLibraryOnOneRankRaisesOnAll) {
  auto backend = fake.backend();
  if (rank == size - 1) backend.problem = "libnccl.so.2: cannot open shared object file";
  expect_words(
      message_of<CommunicationError>([&] { nccl::make_communicator(backend, world, torch::kCPU); }),
      {"nccl_communicator world/nccl, rank " + std::to_string(rank),
       "rank " + std::to_string(size - 1) + ": libnccl.so.2: cannot open"});
  EXPECT_EQ(fake.created, 0);
}

TEST_F(NcclStartTest, LibrariesAreMissedByName) {
  expect_words(message_of<std::runtime_error>([] { nccl::load_nccl("libno_such_nccl.so.2"); }),
               {"libno_such_nccl.so.2"});
  expect_words(message_of<std::runtime_error>([] { nccl::load_nccl("libm.so.6"); }),
               {"libm.so.6 is too old: it has no ncclGetVersion"});
}

TEST_F(NcclStartTest, DifferentVersionsRaise) {
  if (size == 1) GTEST_SKIP() << "needs two ranks";
  if (rank == 1) fake.version = 22000;
  expect_words(message_of<CommunicationError>([&] { make(); }),
               {"different versions of NCCL", "rank 0 22809, rank 1 22000"});
}

TEST_F(NcclStartTest, NoIdRaisesOnAll) {
  fake.unique_id_fails = rank == 0;
  expect_words(message_of<CommunicationError>([&] { make(); }),
               {"rank 0: ncclGetUniqueId: unhandled system error"});
  EXPECT_EQ(fake.created, 0);
}

TEST_F(NcclStartTest, AFailureOnOneRankRaisesOnAll) {
  fake.init_fails = rank == size - 1;
  fake.init_hangs = rank != size - 1;  // as they would, waiting for that rank
  std::vector<std::string> words = {
      "rank " + std::to_string(size - 1) +
      ": NCCL reports unhandled system error (the fake's last words)"};
  if (size > 1) words.emplace_back("rank 0: the ranks did not come together in NCCL in 0.5 s");
  expect_words(message_of<CommunicationError>([&] { make(kSoon); }), words);
  EXPECT_EQ(fake.created, 1);
  EXPECT_EQ(fake.aborted, 1);
}

TEST_F(NcclStartTest, AFailedSplitRaisesOnAll) {
  comm = make(kSoon);
  fake.init_hangs = true;
  expect_words(message_of<CommunicationError>([&] { comm->split(0, rank); }),
               {"nccl_communicator world/nccl/split(0)", "did not come together"});
  EXPECT_EQ(fake.aborted, 1);
}

TEST_F(NcclStartTest, OnlyGpusAreTaken) {
  expect_words(message_of<c10::Error>([&] { nccl_communicator(world, torch::kCPU); }),
               {"needs a CUDA device, got cpu"});
}

class NcclFailureTest : public NcclCommunicatorTest {
 protected:
  /// The next call and the one after raise, and the message has these words.
  void expect_broken(const std::vector<std::string>& words) {
    for (int i = 0; i < 2; ++i)
      expect_words(message_of<CommunicationError>([&] { comm->all_reduce(torch::ones({2})); }),
                   words);
    EXPECT_EQ(fake.aborted, 1);
    forgive();
  }
  std::string here() const {
    return " on world/nccl, rank " + std::to_string(rank) + " of " + std::to_string(size);
  }
};

TEST_F(NcclFailureTest, AsynchronousErrorsAbortOnceAndAreSaidAtOnce) {
  comm = make();
  ::testing::internal::CaptureStderr();
  {
    const ModuleScope scope("encoder.norm");
    fake.device_hangs = true;  // so that the operation is still there to be named
    comm->all_reduce(torch::ones({2}));
    fake.async_error = ncclSystemError;
  }
  wait_for_abort();
  const auto text = ::testing::internal::GetCapturedStderr();
  const auto message = "all_reduce #0 of encoder.norm" + here() +
                       ": NCCL reports unhandled system error (the fake's last words)";
  EXPECT_EQ(text, "syncnorm: " + message + "\n");
  expect_broken({"failed before: " + message});
}

TEST_F(NcclFailureTest, AnErrorBetweenOperationsNamesTheCommunicator) {
  comm = make();
  fake.async_error = ncclSystemError;
  wait_for_abort();
  expect_broken({"failed before: world/nccl, rank " + std::to_string(rank) + " of " +
                 std::to_string(size) + ": NCCL reports unhandled system error"});
}

TEST_F(NcclFailureTest, AnOperationThatTheDeviceDoesNotFinishTimesOut) {
  if (full_checks()) GTEST_SKIP() << "the fingerprints would wait for the missing rank";
  comm = make(kSoon);
  const bool missing = size > 1 && rank == size - 1;
  {
    const ModuleScope scope("decoder.norm");
    comm->all_reduce(torch::ones({2}));
    fake.device_hangs = true;
    if (!missing) comm->all_reduce(torch::ones({2}));
  }
  if (!missing) {
    wait_for_abort();
    std::vector<std::string> words = {
        "all_reduce #1 of decoder.norm" + here() +
        ": timed out after 1 s (SYNCNORM_TIMEOUT) waiting for the device"};
    if (size > 1)
      words.push_back("; rank " + std::to_string(size - 1) +
                      " has not entered it: last seen leaving all_reduce #0 of decoder.norm");
    expect_broken(words);
  }
  world->barrier();  // the missing rank must not be gone before the others have looked for it
  fake.device_hangs = false;
}

TEST_F(NcclFailureTest, AnOperationThatNcclDoesNotStartTimesOut) {
  comm = make(kSoon);
  fake.start_hangs = true;
  const ModuleScope scope("decoder.norm");
  expect_words(message_of<CommunicationError>([&] { comm->all_reduce(torch::ones({2})); }),
               {"all_reduce #0 of decoder.norm" + here() +
                ": timed out after 1 s (SYNCNORM_TIMEOUT) waiting for NCCL to start it"});
  expect_broken({"failed before: all_reduce #0 of decoder.norm"});
}

TEST_F(NcclFailureTest, ACallThatFailsRaisesAtOnce) {
  comm = make();
  fake.call_fails = true;
  expect_words(message_of<CommunicationError>([&] { comm->barrier(); }),
               {"barrier #0" + here() + ": NCCL reports some other error"});
  expect_broken({"failed before: barrier #0"});
}

TEST_F(NcclFailureTest, ABarrierComesBackFromTheDevice) {
  comm = make(kSoon);
  fake.device_hangs = true;
  expect_words(message_of<CommunicationError>([&] { comm->barrier(); }),
               {"barrier #0" + here() + ": timed out after 1 s"});
  expect_broken({"failed before: barrier #0"});
}

TEST_F(NcclFailureTest, ErrorsOfTheDeviceAreReported) {
  comm = make();
  fake.event_error = cudaErrorIllegalAddress;
  comm->all_reduce(torch::ones({2}));
  wait_for_abort();
  expect_broken({"failed before: all_reduce #0" + here() + ": CUDA reports a fake CUDA error"});
}

TEST_F(NcclFailureTest, TheOldestOfManyIsNamed) {
  comm = make(3);
  fake.device_hangs = true;
  for (int i = 0; i < 200; ++i) comm->all_reduce(torch::ones({2}));
  EXPECT_LE(fake.events_created, 64);
  wait_for_abort();
  expect_broken({"failed before: all_reduce #0" + here()});
}

class NcclEndTest : public NcclCommunicatorTest {};

TEST_F(NcclEndTest, WaitsForWhatIsQueued) {
  comm = make();
  fake.device_hangs = true;
  comm->all_reduce(torch::ones({2}));
  std::thread release([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_EQ(fake.destroyed, 0);
    fake.device_hangs = false;
  });
  comm.reset();
  release.join();
  EXPECT_EQ(fake.destroyed, 1);
  EXPECT_EQ(fake.aborted, 0);
}

TEST_F(NcclEndTest, AbortsWhereTheDeviceNeverFinishes) {
  comm = make(kSoon);
  fake.device_hangs = true;
  comm->all_reduce(torch::ones({2}));
  comm.reset();
  EXPECT_EQ(fake.aborted, 1);
  forgive();
}

TEST_F(NcclEndTest, AbortsWhereNcclDoesNotEnd) {
  comm = make();
  fake.finalize_hangs = true;
  comm.reset();
  EXPECT_EQ(fake.destroyed, 0);
  EXPECT_EQ(fake.aborted, 1);
}

TEST_F(NcclEndTest, LeavesNcclAloneOnceTheDriverIsGone) {
  comm = make();
  comm->all_reduce(torch::ones({2}));
  fake.driver_gone = true;
  comm.reset();
  EXPECT_EQ(fake.destroyed + fake.aborted, 0);
  fake.destroyed = 1;  // nothing is left to be counted by
  fake.events_destroyed = fake.events_created.load();
}

}  // namespace
}  // namespace syncnorm
