#include "support/rank_reporter.h"

#include <sched.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <sstream>

namespace syncnorm::testing {
namespace {

std::string full_name(const ::testing::TestInfo& test) {
  return std::string(test.test_suite_name()) + "." + test.name();
}

std::string join(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

/// What each rank tells every other one at the end of a test.
struct Report {
  uint64_t step;
  uint64_t name_hash;
  uint64_t failed;
};

}  // namespace

RankReporter::RankReporter() {
  MPI_Comm_dup(MPI_COMM_WORLD, &comm_);
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
  watchdog_.set_prefix("[rank " + std::to_string(rank_) + "/" + std::to_string(size_) + "] ");
}

void RankReporter::print(const std::string& text) const {
  std::ostringstream out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    out << "[rank " << rank_ << "/" << size_ << "] " << line << "\n";
  }
  // One write keeps the lines of a message together when ranks print at the same time.
  std::fflush(stdout);
  const std::string block = out.str();
  std::fwrite(block.data(), 1, block.size(), stderr);
  std::fflush(stderr);
}

void RankReporter::OnTestStart(const ::testing::TestInfo& test) {
  current_test_ = full_name(test);
  watchdog_.start("in " + current_test_, seconds_from_environment("SYNCNORM_TEST_TIMEOUT", 120));
}

void RankReporter::OnTestPartResult(const ::testing::TestPartResult& part) {
  if (rank_ == 0 || meeting_ || !part.failed()) return;
  std::ostringstream text;
  text << (part.file_name() ? part.file_name() : "unknown file") << ":" << part.line_number()
       << ": Failure in " << current_test_ << "\n"
       << part.message();
  print(text.str());
}

void RankReporter::OnTestEnd(const ::testing::TestInfo& test) {
  meeting_ = true;
  const bool failed_here = test.result()->Failed();
  const std::vector<int> failed = meet(current_test_, failed_here);
  if (!failed.empty() && !failed_here) {
    ADD_FAILURE() << "failed on " << join(failed) << " of " << size_ << " (not on this one, rank "
                  << rank_ << ")";
  }
  meeting_ = false;
  watchdog_.stop();
}

void RankReporter::OnEnvironmentsTearDownStart(const ::testing::UnitTest&) { watchdog_.stop(); }

bool RankReporter::agree_on_result(bool failed_here) {
  watchdog_.start("at the end of all tests",
                  seconds_from_environment("SYNCNORM_TEST_TIMEOUT", 120));
  const bool failed = !meet("all tests", failed_here).empty();
  watchdog_.stop();
  MPI_Comm_free(&comm_);
  return failed;
}

std::vector<int> RankReporter::meet(const std::string& name, bool failed_here) {
  watchdog_.note("ended " + name + ", waiting for the other ranks");
  const Report mine{static_cast<uint64_t>(step_++), std::hash<std::string>{}(name),
                    failed_here ? 1U : 0U};
  std::vector<Report> reports(size_);
  std::vector<MPI_Request> requests(2 * size_);
  for (int peer = 0; peer < size_; ++peer) {
    MPI_Irecv(&reports[peer], 3, MPI_UINT64_T, peer, 0, comm_, &requests[peer]);
    MPI_Isend(&mine, 3, MPI_UINT64_T, peer, 0, comm_, &requests[size_ + peer]);
  }

  using Clock = std::chrono::steady_clock;
  const double grace = seconds_from_environment("SYNCNORM_TEST_GRACE", 30);
  const auto deadline = Clock::now() + std::chrono::duration<double>(grace);
  // A rank that passed waits as long as the watchdog lets the test last; only a failure makes it
  // likely that the others wait for this rank in vain.
  for (int done = 0; !done;) {
    MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE);
    if (done) break;
    sched_yield();
    if (!failed_here || grace <= 0 || Clock::now() < deadline) continue;
    std::vector<int> absent;
    for (int peer = 0; peer < size_; ++peer) {
      int arrived = 0;
      MPI_Request_get_status(requests[peer], &arrived, MPI_STATUS_IGNORE);
      if (!arrived) absent.push_back(peer);
    }
    watchdog_.end_job(name + " failed on this rank and " + join(absent) +
                      " did not reach its end in " + std::to_string(static_cast<int>(grace)) +
                      " s: waiting for this rank, or stuck");
  }

  std::vector<int> failed;
  for (int peer = 0; peer < size_; ++peer) {
    if (reports[peer].step != mine.step || reports[peer].name_hash != mine.name_hash) {
      watchdog_.end_job("this rank ended " + name + ", rank " + std::to_string(peer) +
                        " another test: all ranks need the same --gtest_filter and order");
    }
    if (reports[peer].failed) failed.push_back(peer);
  }
  return failed;
}

}  // namespace syncnorm::testing
