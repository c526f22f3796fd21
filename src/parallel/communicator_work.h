#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>

#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "syncnorm/communicator.h"

namespace syncnorm {

/// A collective waiting for its turn on a CollectiveQueue, and the handle its caller waits on.
class CommunicatorWork final : public c10d::Work {
 public:
  using Body = std::function<void(Communicator&)>;

  /// `touched`: every tensor that `body` reads or writes; `outputs`: the value of the future. Work
  /// already queued on the callers' streams for tensors on a GPU is ordered before `body`.
  CommunicatorWork(int rank, c10d::OpType op, Body body, const std::vector<at::Tensor>& touched,
                   std::vector<at::Tensor> outputs);

  /// Executes the body; what it throws goes to wait() and to the future. On the queue's thread.
  void run(Communicator& comm) noexcept;
  /// Completes the work with an exception instead of executing it.
  void fail(std::exception_ptr error) noexcept;

  void synchronize() override { future_->wait(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  void run_on_side_streams(Communicator& comm);

  Body body_;
  std::vector<at::Tensor> touched_;
  std::vector<at::Tensor> outputs_;
  std::vector<c10::Device> devices_;
  std::vector<c10::Event> ready_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace syncnorm
