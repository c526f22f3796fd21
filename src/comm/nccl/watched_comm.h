#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/board_line.h"
#include "comm/nccl/api.h"

namespace syncnorm::nccl {

/// What an operation is called in messages, and its number on its communicator.
struct Label {
  std::string text;
  uint64_t sequence = 0;
};

/// An NCCL communicator of its own together with the thread that watches what is queued on it.
///
/// NCCL wants no other call in progress while a communicator is aborted, so every call is made
/// under one lock; the communicator is nonblocking, so none of them lasts. After a failure the
/// communicator is aborted, once, and never touched again.
///
/// Thread safety: one thread at a time, beside the watching one.
class WatchedComm {
 public:
  /// Takes over `comm`, which is ready. `owner` names it where no operation is to blame; `line` is
  /// where its ranks see each other.
  WatchedComm(Backend backend, int device, ncclComm_t comm, std::string owner, BoardLine line);

  /// Waits for what is queued, as long as an operation may take, then destroys the communicator;
  /// aborts it where that does not succeed. Does not raise.
  ~WatchedComm();
  WatchedComm(const WatchedComm&) = delete;
  WatchedComm& operator=(const WatchedComm&) = delete;

  /// Calls `enqueue(api, comm)`, returns when NCCL has put the work on `stream`, and has it
  /// watched. Raises CommunicationError where that fails or something failed before.
  template <typename F>
  void run(const Label& label, cudaStream_t stream, const F& enqueue) {
    const BoardLine::Entered entered(line_, label.sequence, label.text);
    ncclResult_t result = ncclInProgress;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      raise_if_failed();
      result = enqueue(backend_.nccl, comm_);
    }
    settle(label, result);
    watch(label, stream);
  }

  /// Waits for the stream; the watching thread bounds the time.
  void synchronize(const Label& label, cudaStream_t stream);

  bool is_capturing(cudaStream_t stream) const;

  const BoardLine& line() const { return line_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Watched {
    Label label;
    Clock::time_point since;
    cudaEvent_t event = nullptr;
  };

  void raise_if_failed() const;
  void settle(const Label& label, ncclResult_t result);
  void watch(const Label& label, cudaStream_t stream);
  cudaEvent_t take_event();
  [[noreturn]] void fail_here(const std::string& message);
  void fail(const std::string& message);
  void abort();

  void watch_loop();
  std::string look();
  std::string waited_too_long(const Label& label, Clock::time_point since,
                              const char* for_what) const;
  std::string nccl_text(ncclResult_t result) const;
  std::string cuda_text(cudaError_t error) const;
  bool drain();
  void close();

  const Backend backend_;
  const int device_;
  const ncclComm_t comm_;
  const std::string owner_;
  const BoardLine line_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Watched> watched_;     // oldest first
  std::vector<cudaEvent_t> spare_;  // events that nothing waits for
  std::string failure_;             // not empty: comm_ is gone
  bool captured_ = false;           // a graph may hold on to comm_
  bool driver_gone_ = false;
  bool closing_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace syncnorm::nccl
