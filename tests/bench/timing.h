#pragma once

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <vector>

#include "syncnorm/communicator.h"

namespace syncnorm::bench {

inline std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown processor";
}

/// Median over repetitions, microseconds; ranks start each together.
template <typename F>
double median_us(Communicator& comm, int repetitions, F&& body) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  for (int i = 0; i < repetitions + 2; ++i) {
    comm.barrier();
    const auto start = Clock::now();
    body();
    if (i >= 2)
      times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  std::nth_element(times.begin(), times.begin() + repetitions / 2, times.end());
  return times[repetitions / 2];
}

}  // namespace syncnorm::bench
