#include "parallel/communicator_work.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace syncnorm {
namespace {

std::vector<c10::Device> accelerators_of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  for (const auto& tensor : tensors) {
    const bool seen = std::find(devices.begin(), devices.end(), tensor.device()) != devices.end();
    if (!tensor.device().is_cpu() && !seen) devices.push_back(tensor.device());
  }
  // ivalue::Future wants its devices in order.
  std::sort(devices.begin(), devices.end(),
            [](c10::Device a, c10::Device b) { return a.index() < b.index(); });
  return devices;
}

}  // namespace

CommunicatorWork::CommunicatorWork(int rank, c10d::OpType op, Body body,
                                   const std::vector<at::Tensor>& touched,
                                   std::vector<at::Tensor> outputs)
    : c10d::Work(rank, op),
      body_(std::move(body)),
      touched_(touched),
      outputs_(std::move(outputs)),
      devices_(accelerators_of(touched)),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), devices_)) {
  for (const auto& device : devices_) {
    ready_.emplace_back(device.type());
    ready_.back().record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
}

void CommunicatorWork::run(Communicator& comm) noexcept {
  try {
    const at::NoGradGuard no_grad;
    run_on_side_streams(comm);
  } catch (...) {
    fail(std::current_exception());
  }
}

void CommunicatorWork::run_on_side_streams(Communicator& comm) {
  std::vector<c10::Stream> streams;
  for (size_t i = 0; i < devices_.size(); ++i) {
    const c10::impl::VirtualGuardImpl guard(devices_[i].type());
    streams.push_back(guard.getStreamFromGlobalPool(devices_[i]));
    ready_[i].block(streams.back());
    for (const auto& tensor : touched_) {
      if (tensor.device() == devices_[i]) {
        guard.recordDataPtrOnStream(tensor.storage().data_ptr(), streams.back());
      }
    }
  }
  const c10::MultiStreamGuard on_side_streams(streams);
  body_(comm);
  body_ = nullptr;
  touched_.clear();
  // The future first: it records events on the side streams, on which synchronize() makes the
  // caller's streams wait.
  future_->markCompleted(c10::IValue(outputs_));
  finish();
}

void CommunicatorWork::fail(std::exception_ptr error) noexcept {
  body_ = nullptr;
  touched_.clear();
  future_->setErrorIfNeeded(error);
  finish(std::move(error));
}

}  // namespace syncnorm
