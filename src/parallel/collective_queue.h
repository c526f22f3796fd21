#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <thread>

#include "parallel/communicator_work.h"
#include "syncnorm/communicator.h"

namespace syncnorm {

/// Executes collectives over one communicator, in the order they were pushed, on a thread of its
/// own.
class CollectiveQueue {
 public:
  explicit CollectiveQueue(std::shared_ptr<Communicator> comm);

  /// Finishes what was pushed, without starting anything else. Where that takes longer than a grace
  /// time (the other ranks have gone, or this one is being unwound by an exception) it warns and
  /// leaves the thread behind.
  ~CollectiveQueue();
  CollectiveQueue(const CollectiveQueue&) = delete;
  CollectiveQueue& operator=(const CollectiveQueue&) = delete;

  void push(c10::intrusive_ptr<CommunicatorWork> work);

 private:
  // Shared with the thread, which may outlive the queue.
  struct State;
  static void serve(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace syncnorm
