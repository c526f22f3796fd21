#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "syncnorm/communicator.h"

/// Google Benchmark for programs of several ranks.
///
/// A `Case` is one input with the things that are timed on it side by side, its contestants. All
/// ranks run the same calls in the same order: numbers of calls are fixed beforehand, since ranks
/// that decided by their own clocks would wait for each other for ever. Repetitions take turns
/// (ours, ATen, loop, ours, ATen, loop, ...), so that a machine whose speed drifts favours none.
/// One repetition of one contestant is an untimed call, then `calls_of(bytes)` timed ones, each
/// from a barrier to the end of the slowest rank, of which the median counts. Rank 0 alone reports.
namespace syncnorm::bench {

/// One call of each contestant, by name.
using Calls = std::map<std::string, std::function<void()>>;

struct Contestant {
  std::string name;
  /// How many times at least an input's worth of values goes through memory in one call; 0 where
  /// that is not what takes the time.
  double passes = 0;
};

struct Case {
  /// Norm, size, memory format and dtype, with slashes:
  /// "SyncBatchNorm/2x64x56x56/contiguous/Float".
  std::string name;
  /// What is timed, in the order of taking turns; ratios are to the first.
  std::vector<Contestant> contestants;
  /// Size of one rank's input in bytes.
  int64_t bytes = 0;
  /// Makes the inputs and compares the results, raising where they differ; returns the calls of
  /// all contestants. Runs on all ranks before the case's first repetition.
  std::function<Calls()> prepare;
  /// Runs untimed before each repetition of the named contestant, where set.
  std::function<void(const std::string&)> before = nullptr;
};

/// Registers every contestant of a case with Google Benchmark, as "<case>/<contestant>".
void add_case(Case description);

/// Timed calls in one repetition: few where the input is large.
int64_t calls_of(int64_t bytes);

/// A main(): starts the environment, calls `add_cases`, runs what --benchmark_filter selects and
/// reports on rank 0: a table on standard output, or what --benchmark_format and --benchmark_out
/// say. Returns the status of the program. An exception ends the job with its message.
int run_benchmarks(int argc, char** argv, const std::function<void()>& add_cases);

/// Raises unless |a - b| <= tolerance * (1 + max |b|) everywhere; `what` begins the message.
void expect_close(const at::Tensor& a, const at::Tensor& b, double tolerance,
                  const std::string& what);

/// Relative difference allowed between two roads to the same values of this dtype: rounding of
/// inputs and outputs, and of sums over a few thousand values.
double tolerance_of(at::ScalarType dtype);

/// "2x64x56x56"
std::string shape_text(at::IntArrayRef shape);

}  // namespace syncnorm::bench
