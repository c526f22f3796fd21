// A GoogleTest main for tests that run on several MPI ranks.
//
// Every rank runs every test. After each test the ranks tell each other how it went, so a test that
// failed on one rank is a failed test on all of them, and the exit status agrees. Rank 0 prints the
// usual progress; failures of the other ranks appear as they happen, each line with "[rank r/P] ".
// A rank that does not come to the end of a test ends the job with a message that names the test
// and the rank:
//   SYNCNORM_TEST_TIMEOUT  seconds a test may take (default 120; 0: no limit, for debuggers)
//   SYNCNORM_TEST_GRACE    seconds a rank whose test failed waits for the others (default 30)
// The exit status is 77 where every selected test was skipped.

#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdio>
#include <exception>
#include <string>

#include "support/rank_reporter.h"
#include "syncnorm/environment.h"

namespace {

constexpr int kAllSkipped = 77;

int run_tests(int argc, char** argv) {
  syncnorm::Environment environment(argc, argv);
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  const int rank = environment.world()->rank();
  if (rank != 0) {
    delete listeners.Release(listeners.default_result_printer());
    ::testing::GTEST_FLAG(output) = "";
  }
  auto* reporter = new syncnorm::testing::RankReporter();  // gtest deletes it
  listeners.Append(reporter);

  const bool failed_here = RUN_ALL_TESTS() != 0;
  const bool failed = reporter->agree_on_result(failed_here);
  const auto& unit = *::testing::UnitTest::GetInstance();
  if (rank == 0 && unit.test_to_run_count() == 0) {
    std::fprintf(stderr, "no test matches --gtest_filter=%s\n",
                 ::testing::GTEST_FLAG(filter).c_str());
  }
  if (failed || unit.test_to_run_count() == 0) return 1;
  return unit.skipped_test_count() == unit.test_to_run_count() ? kAllSkipped : 0;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (::testing::GTEST_FLAG(list_tests)) return RUN_ALL_TESTS();
  try {
    return run_tests(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
