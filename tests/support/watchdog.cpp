#include "support/watchdog.h"

#include <mpi.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace syncnorm::testing {

double seconds_from_environment(const char* name, double fallback) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return fallback;
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  if (*end != '\0' || !(value >= 0)) {
    std::fprintf(stderr, "%s=%s is not a number of seconds (0 or more)\n", name, text);
    std::exit(2);
  }
  return value;
}

Watchdog::~Watchdog() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watchdog::start(const std::string& step, double seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  step_ = step;
  seconds_ = seconds;
  deadline_ = std::chrono::steady_clock::now() +
              std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                  std::chrono::duration<double>(seconds));
  armed_ = seconds > 0;
  if (!thread_.joinable()) thread_ = std::thread([this] { watch(); });
  changed_.notify_all();
}

void Watchdog::note(const std::string& step) {
  std::lock_guard<std::mutex> lock(mutex_);
  step_ = step;
}

void Watchdog::stop() {
  std::lock_guard<std::mutex> lock(mutex_);
  armed_ = false;
}

void Watchdog::watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!ending_) {
    if (!armed_) {
      changed_.wait(lock);
    } else if (changed_.wait_until(lock, deadline_) == std::cv_status::timeout && armed_ &&
               std::chrono::steady_clock::now() >= deadline_) {
      const std::string message = "stuck for " + std::to_string(static_cast<int>(seconds_)) +
                                  " s (SYNCNORM_TEST_TIMEOUT): " + step_;
      lock.unlock();
      end_job(message);
    }
  }
}

void Watchdog::end_job(const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "%s%s; ending the job\n", prefix_.c_str(), message.c_str());
  std::fflush(stderr);
  // The launcher kills a rank at once when another aborts, so the others get a moment to tell where
  // they are.
  sleep(1);
  MPI_Abort(MPI_COMM_WORLD, 1);
  _exit(1);
}

}  // namespace syncnorm::testing
