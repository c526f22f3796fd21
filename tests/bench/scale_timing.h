#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "syncnorm/communicator.h"

namespace syncnorm::bench {

/// Microseconds of every round of each call on the slowest rank, [calls][rounds], the same on all
/// ranks. Calls take turns, so that the machine's moods hit all alike; the ranks start each
/// together. The first rounds warm up and do not count.
inline std::vector<std::vector<double>> times_in_turns(
    Communicator& comm, int rounds, const std::vector<std::function<void()>>& calls) {
  using Clock = std::chrono::steady_clock;
  const int warm_up = std::max(2, rounds / 10);
  auto taken = torch::zeros({static_cast<int64_t>(calls.size()), rounds}, torch::kDouble);
  auto at = taken.accessor<double, 2>();
  for (int round = -warm_up; round < rounds; ++round) {
    for (size_t i = 0; i < calls.size(); ++i) {
      comm.barrier();
      const auto start = Clock::now();
      calls[i]();
      const std::chrono::duration<double, std::micro> time = Clock::now() - start;
      if (round >= 0) at[static_cast<int64_t>(i)][round] = time.count();
    }
  }
  comm.all_reduce(taken, ReduceOp::max);
  std::vector<std::vector<double>> times;
  for (size_t i = 0; i < calls.size(); ++i) {
    const double* row = taken[static_cast<int64_t>(i)].data_ptr<double>();
    times.emplace_back(row, row + rounds);
  }
  return times;
}

/// The value below which `share` of the values lie: 0.5 is the median.
inline double quantile(std::vector<double> values, double share) {
  const auto place = static_cast<std::ptrdiff_t>(share * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + place, values.end());
  return values[static_cast<size_t>(place)];
}

}  // namespace syncnorm::bench
