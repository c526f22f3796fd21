// What becomes of the NCCL backend's failures, over a fake that makes them: at the start, in
// operations, and at the end.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "comm/status_board.h"
#include "support/nccl_test.h"
#include "syncnorm/nccl.h"

namespace syncnorm {
namespace {

using testing::expect_words;
using testing::kSoon;
using testing::message_of;

bool full_checks() {
  const char* value = std::getenv("SYNCNORM_CHECK");
  return value != nullptr && std::string(value) == "full";
}

class NcclStartTest : public testing::NcclTest {};

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

TEST_F(NcclStartTest, TheRealLibrariesHaveWhatIsNeeded) {
  const auto& backend = nccl::loaded_backend();
  if (backend.problem.find("cannot open shared object") != std::string::npos)
    GTEST_SKIP() << backend.problem;
  EXPECT_EQ(backend.problem, "");
  int version = 0;
  EXPECT_EQ(backend.nccl.get_version(&version), ncclSuccess);
  EXPECT_GE(version, 21400);
}

TEST_F(NcclStartTest, AGpuThatIsNotThereRaisesOnAll) {
  // Over the real libraries, on machines with GPUs and without.
  expect_words(message_of<CommunicationError>(
                   [&] { nccl_communicator(world, c10::Device(torch::kCUDA, 63)); }),
               {"nccl_communicator world/nccl", "rank 0: ", "rank " + std::to_string(size - 1)});
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

class NcclFailureTest : public testing::NcclTest {
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
  expect_broken({"" + message});
}

TEST_F(NcclFailureTest, AnErrorBetweenOperationsNamesTheCommunicator) {
  comm = make();
  fake.async_error = ncclSystemError;
  wait_for_abort();
  expect_broken({"world/nccl, rank " + std::to_string(rank) + " of " + std::to_string(size) +
                 ": NCCL reports unhandled system error"});
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
                      " has not entered it: it has been waiting for ");
    expect_broken(words);
  }
  world->barrier();  // the missing rank must not be gone before the others have looked for it
  fake.device_hangs = false;
}

TEST_F(NcclFailureTest, ARankThatHasEndedIsNotWaitedFor) {
  if (size == 1) GTEST_SKIP() << "needs two ranks";
  if (full_checks()) GTEST_SKIP() << "the fingerprints would wait for the missing rank";
  auto* board = StatusBoard::current();
  ASSERT_NE(board, nullptr);
  const bool missing = rank == size - 1;
  const auto ended = "a rank has ended without it; rank " + std::to_string(size - 1) +
                     " has not entered it: it has left its main program";
  for (auto* hangs : {&fake.device_hangs, &fake.start_hangs}) {
    comm = make();
    *hangs = true;
    if (missing) {
      board->set_phase(StatusBoard::Phase::finalizing);
    } else {
      const auto try_it = [&] { comm->barrier(); };
      expect_words(message_of<CommunicationError>(try_it), {"barrier #0" + here() + ": ", ended});
      EXPECT_EQ(fake.aborted, 1);
      forgive();
    }
    world->barrier();
    board->set_phase(StatusBoard::Phase::running);
    *hangs = false;
    comm.reset();
    world->barrier();
    EXPECT_EQ(fake.created, fake.destroyed + fake.aborted);
    fake.created = fake.destroyed = fake.aborted = 0;
  }
}

TEST_F(NcclFailureTest, AnOperationThatNcclDoesNotStartTimesOut) {
  comm = make(kSoon);
  fake.start_hangs = true;
  const ModuleScope scope("decoder.norm");
  expect_words(message_of<CommunicationError>([&] { comm->all_reduce(torch::ones({2})); }),
               {"all_reduce #0 of decoder.norm" + here() +
                ": timed out after 1 s (SYNCNORM_TIMEOUT) waiting for NCCL to start it"});
  expect_broken({"all_reduce #0 of decoder.norm"});
}

TEST_F(NcclFailureTest, ACallThatFailsRaisesAtOnce) {
  comm = make();
  fake.call_fails = true;
  expect_words(message_of<CommunicationError>([&] { comm->barrier(); }),
               {"barrier #0" + here() + ": NCCL reports some other error"});
  expect_broken({"barrier #0"});
}

TEST_F(NcclFailureTest, ACallThatFailsInAGroupClosesIt) {
  if (size == 1) GTEST_SKIP() << "one call is enough for one rank";
  comm = make();
  fake.call_fails = true;
  fake.take_calls();
  const auto sizes = uneven_sizes();
  expect_words(
      message_of<CommunicationError>([&] { comm->all_gather(torch::ones({sizes[rank]}), sizes); }),
      {"all_gather #0" + here() + ": NCCL reports some other error"});
  EXPECT_EQ(fake.take_calls(),
            (std::vector<std::string>{"group_start", "broadcast Byte x8 from 0", "group_end"}));
  expect_broken({"all_gather #0"});
}

TEST_F(NcclFailureTest, ABarrierComesBackFromTheDevice) {
  comm = make(kSoon);
  fake.device_hangs = true;
  expect_words(message_of<CommunicationError>([&] { comm->barrier(); }),
               {"barrier #0" + here() + ": timed out after 1 s"});
  expect_broken({"barrier #0"});
}

TEST_F(NcclFailureTest, AFullStreamDoesNotKeepTheWatchFromAborting) {
  comm = make(kSoon);
  fake.device_hangs = true;
  comm->all_reduce(torch::ones({2}));
  fake.stream_full = true;
  comm->all_reduce(torch::ones({2}));  // comes back with the abort
  expect_broken({"all_reduce #0" + here() + ": timed out after 1 s"});
}

TEST_F(NcclFailureTest, ErrorsOfTheDeviceAreReported) {
  comm = make();
  fake.event_error = cudaErrorIllegalAddress;
  comm->all_reduce(torch::ones({2}));
  wait_for_abort();
  expect_broken({"all_reduce #0" + here() + ": CUDA reports a fake CUDA error"});
}

TEST_F(NcclFailureTest, TheOldestOfManyIsNamed) {
  comm = make(3);
  fake.device_hangs = true;
  for (int i = 0; i < 200; ++i) comm->all_reduce(torch::ones({2}));
  EXPECT_LE(fake.events_created, 64);
  wait_for_abort();
  expect_broken({"all_reduce #0" + here()});
}

class NcclEndTest : public testing::NcclTest {};

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

TEST_F(NcclEndTest, AnExceptionOnItsWayIsNotHeldUp) {
  const auto start = std::chrono::steady_clock::now();
  try {
    const auto local = make(600);
    fake.device_hangs = true;
    local->all_reduce(torch::ones({2}));
    throw std::runtime_error("from the program");
  } catch (const std::runtime_error&) {
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(100));
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
