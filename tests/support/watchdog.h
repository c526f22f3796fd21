#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace syncnorm::testing {

/// The variable's value, or `fallback` where it is unset or empty; ends the program on anything but
/// a number >= 0.
double seconds_from_environment(const char* name, double fallback);

/// Ends the whole MPI job with a message when a step takes too long. One thread, started with the
/// first step.
class Watchdog {
 public:
  Watchdog() = default;
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void set_prefix(std::string prefix) { prefix_ = std::move(prefix); }

  /// Begins a step that may take `seconds` (0: no limit).
  void start(const std::string& step, double seconds);
  /// Says what the step does now; its time goes on.
  void note(const std::string& step);
  void stop();

  /// Prints `message` and aborts the job on all ranks.
  [[noreturn]] void end_job(const std::string& message);

 private:
  void watch();

  std::string prefix_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
  std::string step_;
  double seconds_ = 0;
  std::chrono::steady_clock::time_point deadline_;
  bool armed_ = false;
  bool ending_ = false;
};

}  // namespace syncnorm::testing
