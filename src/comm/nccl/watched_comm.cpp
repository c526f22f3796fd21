#include "comm/nccl/watched_comm.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <utility>

#include "comm/timeout.h"
#include "syncnorm/error.h"

namespace syncnorm::nccl {
namespace {

using Seconds = std::chrono::duration<double>;

// Operations with an event of their own. Beyond that the newest event moves on to the newest
// operation, so that the oldest and the newest are watched however many are queued.
constexpr size_t kWatched = 64;
constexpr double kLook = 0.1;  // seconds between two looks
constexpr double kClose = 5;   // seconds for NCCL to end in order
constexpr int kSpins = 1000;   // looks at NCCL's state before the processor is given away

}  // namespace

WatchedComm::WatchedComm(Backend backend, int device, ncclComm_t comm, std::string owner,
                         BoardLine line)
    : backend_(std::move(backend)),
      device_(device),
      comm_(comm),
      owner_(std::move(owner)),
      line_(std::move(line)),
      thread_([this] { watch_loop(); }) {}

WatchedComm::~WatchedComm() {
  const bool drained = drain();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
  int device = 0;
  if (driver_gone_ || backend_.cuda.get_device(&device) == cudaErrorCudartUnloading) return;
  if (drained && failure_.empty()) {
    close();
  } else {
    fail(owner_ + ": destroyed with unfinished operations");  // unless it failed before
  }
  for (const auto& watched : watched_) backend_.cuda.event_destroy(watched.event);
  for (const auto event : spare_) backend_.cuda.event_destroy(event);
}

/// Whether all that was queued has been done. Where an exception is on its way the other ranks may
/// never come, and it should get on.
bool WatchedComm::drain() {
  const double limit =
      std::uncaught_exceptions() > 0 ? std::min(kClose, backend_.timeout) : 2 * backend_.timeout;
  std::unique_lock<std::mutex> lock(mutex_);
  closing_ = true;
  changed_.notify_all();
  const auto ended = [this] { return watched_.empty() || !failure_.empty() || driver_gone_; };
  return changed_.wait_for(lock, Seconds(limit), ended) && failure_.empty();
}

void WatchedComm::close() {
  const auto deadline = Clock::now() + Seconds(kClose);
  ncclResult_t state = backend_.nccl.finalize(comm_);
  while (state == ncclInProgress && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (backend_.nccl.async_error(comm_, &state) != ncclSuccess) state = ncclInternalError;
  }
  if (state == ncclSuccess) {
    backend_.nccl.destroy(comm_);
  } else if (state != ncclInProgress || !captured_) {
    backend_.nccl.abort(comm_);
  }
  // Else a graph with operations of comm_ lives on: NCCL goes on finalizing behind us, and even an
  // abort would wait for the graph's end.
}

void WatchedComm::abort() {
  // See close(): this thread may be the one that is to destroy the graph.
  if (captured_) {
    std::thread(backend_.nccl.abort, comm_).detach();
  } else {
    backend_.nccl.abort(comm_);
  }
}

void WatchedComm::raise_if_failed() const {
  if (!failure_.empty()) throw CommunicationError(failure_);
}

/// Waits until NCCL has queued an operation, which the first time needs the other ranks.
void WatchedComm::settle(const Label& label, ncclResult_t result) {
  const auto start = Clock::now();
  for (int polls = 0; result == ncclInProgress; ++polls) {
    if (polls > kSpins) std::this_thread::sleep_for(std::chrono::microseconds(50));
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      raise_if_failed();
      ncclResult_t state = ncclInProgress;
      const ncclResult_t call = backend_.nccl.async_error(comm_, &state);
      result = call == ncclSuccess ? state : call;
    }
    if (result != ncclInProgress || polls < kSpins) continue;
    const auto found = waited_too_long(label, start, "NCCL to start it");
    if (!found.empty()) fail_here(found);
  }
  if (result == ncclSuccess) return;
  std::string why;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    raise_if_failed();
    why = nccl_text(result);
  }
  fail_here(label.text + ": " + why);
}

void WatchedComm::watch(const Label& label, cudaStream_t stream) {
  if (is_capturing(stream)) {
    const std::lock_guard<std::mutex> lock(mutex_);
    captured_ = true;
    return;
  }
  cudaEvent_t event = take_event();
  cudaError_t error = cudaSuccess;
  if (event == nullptr) {
    const CurrentDevice current(backend_.cuda, device_);
    error = backend_.cuda.event_create(&event, cudaEventDisableTiming);
  }
  // Without the lock: a full stream makes this wait, perhaps for an abort by the other thread.
  if (error == cudaSuccess) error = backend_.cuda.event_record(event, stream);
  if (event != nullptr) {
    const std::lock_guard<std::mutex> lock(mutex_);
    watched_.push_back({label, Clock::now(), event});
  }
  if (error != cudaSuccess) fail_here(label.text + ": " + cuda_text(error));
}

/// An event that nothing waits for, or the newest operation's where all are taken; null where one
/// has to be made.
cudaEvent_t WatchedComm::take_event() {
  const std::lock_guard<std::mutex> lock(mutex_);
  cudaEvent_t event = nullptr;
  if (!spare_.empty()) {
    event = spare_.back();
    spare_.pop_back();
  } else if (watched_.size() >= kWatched) {
    event = watched_.back().event;
    watched_.pop_back();
  }
  return event;
}

void WatchedComm::synchronize(const Label& label, cudaStream_t stream) {
  const cudaError_t error = backend_.cuda.synchronize(stream);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    raise_if_failed();
  }
  if (error != cudaSuccess) fail_here(label.text + ": " + cuda_text(error));
}

bool WatchedComm::is_capturing(cudaStream_t stream) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return backend_.cuda.is_capturing(stream, &status) == cudaSuccess &&
         status != cudaStreamCaptureStatusNone;
}

void WatchedComm::fail_here(const std::string& message) {
  fail(message);
  const std::lock_guard<std::mutex> lock(mutex_);
  throw CommunicationError(failure_);  // the first one, where another thread was faster
}

/// Ends the communicator for good, once.
void WatchedComm::fail(const std::string& message) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = message;
  }
  note_abandoned_operation();
  changed_.notify_all();
  abort();  // nobody calls NCCL past a failure, so the lock is not needed, and an abort may last
}

void WatchedComm::watch_loop() {
  // A look at an event from here must not spoil a capture that another thread is at.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  backend_.cuda.set_device(device_);
  backend_.cuda.exchange_capture_mode(&mode);
  const Seconds interval(std::min(kLook, backend_.timeout / 10));
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_ && !driver_gone_ && failure_.empty()) {
    const std::string found = look();
    if (!found.empty()) {
      lock.unlock();
      // Before the abort: the host may be waiting in a stream, and an abort may last.
      std::fprintf(stderr, "syncnorm: %s\n", found.c_str());
      std::fflush(stderr);
      fail(found);
      return;
    }
    if (watched_.empty()) changed_.notify_all();
    changed_.wait_for(lock, closing_ ? Seconds(1e-3) : interval);
  }
  changed_.notify_all();
}

/// Retires what is done; what has gone wrong, or "".
std::string WatchedComm::look() {
  while (!watched_.empty()) {
    const cudaError_t state = backend_.cuda.event_query(watched_.front().event);
    if (state == cudaErrorNotReady) break;
    if (state == cudaErrorCudartUnloading) {
      driver_gone_ = true;
      return "";
    }
    if (state != cudaSuccess) return watched_.front().label.text + ": " + cuda_text(state);
    spare_.push_back(watched_.front().event);
    watched_.pop_front();
  }
  const std::string subject = watched_.empty() ? owner_ : watched_.front().label.text;
  ncclResult_t state = ncclSuccess;
  const ncclResult_t call = backend_.nccl.async_error(comm_, &state);
  if (call != ncclSuccess) state = call;
  if (state != ncclSuccess && state != ncclInProgress) return subject + ": " + nccl_text(state);
  if (watched_.empty()) return "";
  return waited_too_long(watched_.front().label, watched_.front().since, "the device to finish it");
}

/// Why it is no use to wait any longer for an operation, or "".
std::string WatchedComm::waited_too_long(const Label& label, Clock::time_point since,
                                         const char* for_what) const {
  const Seconds waited = Clock::now() - since;
  if (waited < Seconds(std::min(1.0, backend_.timeout))) return "";
  const auto failed = line_.peers_in(StatusBoard::Fate::failed, label.sequence);
  if (!failed.empty()) return label.text + ": it failed on " + failed;
  const auto missing = line_.absentees(label.sequence);
  if (!line_.peers_in(StatusBoard::Fate::ended, label.sequence).empty())
    return label.text + ": a rank has ended without it" + missing;
  if (waited < Seconds(backend_.timeout)) return "";
  std::array<char, 64> seconds{};
  std::snprintf(seconds.data(), seconds.size(), "%g s (SYNCNORM_TIMEOUT)", backend_.timeout);
  return label.text + ": timed out after " + seconds.data() + " waiting for " + for_what + missing;
}

std::string WatchedComm::nccl_text(ncclResult_t result) const {
  std::string text = std::string("NCCL reports ") + backend_.nccl.error_string(result);
  const char* detail = backend_.nccl.last_error(comm_);
  return detail == nullptr || *detail == '\0' ? text : text + " (" + detail + ")";
}

std::string WatchedComm::cuda_text(cudaError_t error) const {
  return std::string("CUDA reports ") + backend_.cuda.error_string(error);
}

}  // namespace syncnorm::nccl
