#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <thread>

#include "parallel/communicator_work.h"
#include "syncnorm/communicator.h"

namespace syncnorm {

/// Executes collectives over one communicator, in the order they were pushed, on a thread of its
/// own.
///
/// Why blocking calls on a thread and not MPI_Iallreduce from the computing one:
/// tests/bench/overlap_bench found no difference beyond noise (2 ranks of 1 thread on 2 busy
/// cores, 7.5 MB of gradients in 5 buckets, two runs; time of a step relative to reducing after
/// backward: thread 0.97 and 1.06, nonblocking 0.99 and 1.05, nonblocking and polled 0.95 and
/// 1.01). And futures, as c10d::Reducer waits on them, need a thread to complete them in any case.
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
