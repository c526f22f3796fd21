#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>
#include <utility>
#include <vector>

namespace syncnorm {

/// Waits until what is queued for the tensor's memory on its current stream is done.
inline void wait_for_stream(const at::Tensor& tensor) {
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  guard.synchronizeStream(guard.getStream(tensor.device()));
}

/// Brings a tensor to where and how MPI can reduce or move it, and back.
///
/// A CUDA tensor comes through pinned memory on the current stream, which this waits for on the way
/// to the host, and not on the way back.
class HostStage {
 public:
  HostStage(const at::Tensor& tensor, at::ScalarType dtype)
      : original_(tensor), host_(to_host(tensor, dtype)) {}
  const at::Tensor& host() const { return host_; }

  /// Memory on the host like host(), of another shape.
  at::Tensor empty(at::IntArrayRef shape) const {
    return at::empty(shape, host_.options().pinned_memory(original_.is_cuda()));
  }

  void copy_back() const {
    if (!host_.is_alias_of(original_)) original_.copy_(host_, /*non_blocking=*/true);
  }

  /// A result on the host as the caller of MPI expects it: device and dtype of the original.
  at::Tensor deliver(const at::Tensor& result) const {
    return result.to(original_.device(), original_.scalar_type(), /*non_blocking=*/true);
  }

 private:
  static at::Tensor to_host(const at::Tensor& tensor, at::ScalarType dtype) {
    if (tensor.is_cpu() && tensor.scalar_type() == dtype) return tensor.contiguous();
    if (!tensor.is_cuda()) return tensor.to(at::kCPU, dtype).contiguous();
    const auto options = at::TensorOptions().dtype(dtype).pinned_memory(true);
    const auto host = at::empty(tensor.sizes(), options);
    host.copy_(tensor.to(dtype), /*non_blocking=*/true);  // converted on the device
    wait_for_stream(tensor);
    return host;
  }

  at::Tensor original_;
  at::Tensor host_;
};

/// MPI may still write to the memory of an operation that failed half way, so it is then given up
/// instead of freed.
class InFlight {
 public:
  explicit InFlight(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}
  ~InFlight() {
    if (std::uncaught_exceptions() > exceptions_) give_up();
  }
  void give_up() { new std::vector<at::Tensor>(std::move(tensors_)); }
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

 private:
  std::vector<at::Tensor> tensors_;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace syncnorm
