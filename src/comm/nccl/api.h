#pragma once

#include <c10/core/Device.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <string>

namespace syncnorm::nccl {

/// The functions of NCCL in use. A table, since the library is found when it is first needed, and
/// so that tests can put their own in its place.
struct NcclApi {
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;
  decltype(&ncclGetUniqueId) unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) init_rank = nullptr;
  decltype(&ncclCommGetAsyncError) async_error = nullptr;
  decltype(&ncclCommFinalize) finalize = nullptr;
  decltype(&ncclCommDestroy) destroy = nullptr;
  decltype(&ncclCommAbort) abort = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&ncclBroadcast) broadcast = nullptr;
  decltype(&ncclReduce) reduce = nullptr;
};

/// The same for the CUDA runtime, and PyTorch's current stream of a device.
struct CudaApi {
  decltype(&cudaGetErrorString) error_string = nullptr;
  decltype(&cudaGetDevice) get_device = nullptr;
  decltype(&cudaSetDevice) set_device = nullptr;
  decltype(&cudaDeviceGetPCIBusId) pci_bus_id = nullptr;
  decltype(&cudaEventCreateWithFlags) event_create = nullptr;
  decltype(&cudaEventRecord) event_record = nullptr;
  decltype(&cudaEventQuery) event_query = nullptr;
  decltype(&cudaEventDestroy) event_destroy = nullptr;
  decltype(&cudaStreamIsCapturing) is_capturing = nullptr;
  decltype(&cudaStreamSynchronize) synchronize = nullptr;
  decltype(&cudaThreadExchangeStreamCaptureMode) exchange_capture_mode = nullptr;
  cudaStream_t (*current_stream)(c10::Device) = nullptr;
};

/// What the communicator stands on.
struct Backend {
  NcclApi nccl;
  CudaApi cuda;
  std::string problem;   ///< why this rank cannot use them; empty where it can
  double timeout = 600;  ///< seconds
};

/// Fills the table from `library` (a name as dlopen takes it). Raises std::runtime_error where it,
/// or a function in it, is missing.
NcclApi load_nccl(const char* library);

/// NCCL and the CUDA runtime as LibTorch uses them, looked for once. Does not raise.
const Backend& loaded_backend();

/// Makes `index` the current device of this thread while it lives.
class CurrentDevice {
 public:
  CurrentDevice(const CudaApi& cuda, int index) : cuda_(cuda) {
    cuda_.get_device(&previous_);
    cuda_.set_device(index);
  }
  ~CurrentDevice() { cuda_.set_device(previous_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  const CudaApi& cuda_;
  int previous_ = 0;
};

}  // namespace syncnorm::nccl
