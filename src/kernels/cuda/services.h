#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "kernels/cuda/launch.h"

/// What the kernels' host side asks of the CUDA runtime.
namespace syncnorm::kernels::cuda {

Stream current_stream(c10::Device device);
int multiprocessors(c10::Device device);
const char* error_text(Status status);

/// Zero, or the number of the graph that the stream records.
uint64_t captured_graph(Stream stream);

/// Makes `device` the runtime's current one while it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(c10::Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

}  // namespace syncnorm::kernels::cuda
