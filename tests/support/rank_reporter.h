#pragma once

#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/watchdog.h"

namespace syncnorm::testing {

/// Makes all ranks agree on the outcome of every test, and shows the failures of ranks other than
/// 0.
///
/// Listens to GoogleTest on every rank; the end of each test is a meeting of all ranks on a
/// communicator of its own.
class RankReporter : public ::testing::EmptyTestEventListener {
 public:
  RankReporter();

  /// Whether any rank failed, asked once after the last test.
  bool agree_on_result(bool failed_here);

 private:
  void OnTestStart(const ::testing::TestInfo& test) override;
  void OnTestPartResult(const ::testing::TestPartResult& part) override;
  void OnTestEnd(const ::testing::TestInfo& test) override;
  void OnEnvironmentsTearDownStart(const ::testing::UnitTest&) override;

  /// The ranks on which the step called `name` failed. Ends the job when a rank does not come or
  /// comes from elsewhere.
  std::vector<int> meet(const std::string& name, bool failed_here);
  void print(const std::string& text) const;

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  // GoogleTest reports a failure under its lock: asking it for the current test there would
  // deadlock.
  std::string current_test_ = "the set-up of the tests";
  bool meeting_ = false;
  int64_t step_ = 0;
  Watchdog watchdog_;
};

}  // namespace syncnorm::testing
