#include "kernels/cuda/services.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <vector>

namespace syncnorm::kernels::cuda {
namespace {

void check(cudaError_t status, const char* call) {
  TORCH_CHECK(status == cudaSuccess, "syncnorm: ", call, ": ", cudaGetErrorString(status));
}

}  // namespace

Stream current_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStream(device).native_handle();
}

int multiprocessors(c10::Device device) {
  static const std::vector<int> counts = [] {
    int devices = 0;
    check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    std::vector<int> result(devices);
    for (int i = 0; i < devices; ++i)
      check(cudaDeviceGetAttribute(&result[i], cudaDevAttrMultiProcessorCount, i),
            "cudaDeviceGetAttribute");
    return result;
  }();
  return counts.at(device.index());
}

const char* error_text(Status status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

uint64_t captured_graph(Stream stream) {
  auto status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check(cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id, nullptr, nullptr,
                                 nullptr, nullptr),
        "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusActive ? id + 1 : 0;
}

DeviceGuard::DeviceGuard(c10::Device device) {
  check(cudaGetDevice(&previous_), "cudaGetDevice");
  if (previous_ != device.index()) check(cudaSetDevice(device.index()), "cudaSetDevice");
}

DeviceGuard::~DeviceGuard() { cudaSetDevice(previous_); }

}  // namespace syncnorm::kernels::cuda
