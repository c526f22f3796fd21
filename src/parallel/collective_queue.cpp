#include "parallel/collective_queue.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <utility>

#include "comm/timeout.h"

namespace syncnorm {
namespace {

constexpr std::chrono::seconds kGrace(30);
constexpr std::chrono::seconds kGraceWhenUnwinding(1);

}  // namespace

struct CollectiveQueue::State {
  explicit State(std::shared_ptr<Communicator> communicator) : comm(std::move(communicator)) {}

  std::shared_ptr<Communicator> comm;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<c10::intrusive_ptr<CommunicatorWork>> pending;
  bool closing = false;
  bool abandoned = false;
  bool done = false;
};

CollectiveQueue::CollectiveQueue(std::shared_ptr<Communicator> comm)
    : state_(std::make_shared<State>(std::move(comm))),
      thread_([state = state_] { serve(state); }) {}

CollectiveQueue::~CollectiveQueue() {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->closing = true;
  state_->changed.notify_all();
  // A callback of the last future may drop the last reference to the queue on the queue's own
  // thread.
  if (std::this_thread::get_id() == thread_.get_id()) {
    thread_.detach();
    return;
  }
  const auto grace = std::uncaught_exceptions() > 0 ? kGraceWhenUnwinding : kGrace;
  if (state_->changed.wait_for(lock, grace, [&] { return state_->done; })) {
    lock.unlock();
    thread_.join();
    return;
  }
  state_->abandoned = true;
  note_abandoned_operation();
  lock.unlock();
  thread_.detach();
  TORCH_WARN(
      "syncnorm: a process group over ", state_->comm->name(),
      " was destroyed while a collective was still waiting for the other ranks; left it behind.");
}

void CollectiveQueue::push(c10::intrusive_ptr<CommunicatorWork> work) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->pending.push_back(std::move(work));
  state_->changed.notify_all();
}

void CollectiveQueue::serve(const std::shared_ptr<State>& state) {
  // The gradients' owner waits here, not the program: no module's name would be right.
  const ModuleScope scope("process group");
  std::unique_lock<std::mutex> lock(state->mutex);
  for (;;) {
    state->changed.wait(lock, [&] { return state->closing || !state->pending.empty(); });
    if (state->pending.empty()) break;
    auto work = std::move(state->pending.front());
    state->pending.pop_front();
    const bool abandoned = state->abandoned;
    lock.unlock();
    if (abandoned) {
      work->fail(std::make_exception_ptr(
          CommunicationError("the process group was destroyed before this collective started")));
    } else {
      work->run(*state->comm);
    }
    work.reset();
    lock.lock();
  }
  state->done = true;
  if (state->abandoned) note_late_completion();
  state->changed.notify_all();
}

}  // namespace syncnorm
