#pragma once

#include <benchmark/benchmark.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace syncnorm::bench {

/// For ranks other than 0.
class SilentReporter : public benchmark::BenchmarkReporter {
 public:
  SilentReporter() {
    SetOutputStream(&nowhere_);
    SetErrorStream(&nowhere_);
  }
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}

 private:
  std::ostringstream nowhere_;
};

/// One line for each contestant of a case: median over repetitions, their spread, bytes a second,
/// and the case's first contestant's time relative to this one's.
class TableReporter : public benchmark::BenchmarkReporter {
 public:
  /// `hardware` is the first line.
  explicit TableReporter(std::string hardware) : hardware_(std::move(hardware)) {}
  bool ReportContext(const Context&) override;
  void ReportRuns(const std::vector<Run>& runs) override;

 private:
  std::string hardware_;
  std::string case_;
  std::vector<double> first_;  // times of the first contestant, by repetition
};

}  // namespace syncnorm::bench
