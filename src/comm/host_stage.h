#pragma once

#include <ATen/ATen.h>

#include <exception>
#include <utility>
#include <vector>

namespace syncnorm {

/// Brings a tensor to where and how MPI can reduce or move it, and back.
class HostStage {
 public:
  HostStage(const at::Tensor& tensor, at::ScalarType dtype)
      : original_(tensor), host_(tensor.to(at::kCPU, dtype).contiguous()) {}
  const at::Tensor& host() const { return host_; }
  void copy_back() const {
    if (!host_.is_alias_of(original_)) original_.copy_(host_);
  }

 private:
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
