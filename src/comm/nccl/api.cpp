#include "comm/nccl/api.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <stdexcept>

#include "comm/timeout.h"

namespace syncnorm::nccl {
namespace {

/// A shared library by name: the copy that is loaded already, where there is one. Stays loaded.
class Library {
 public:
  explicit Library(std::string name) : name_(std::move(name)) {
    handle_ = dlopen(name_.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) {
      const char* why = dlerror();
      throw std::runtime_error(why == nullptr ? name_ + " cannot be loaded" : why);
    }
  }

  template <typename F>
  void find(const char* function, F& pointer) const {
    pointer = reinterpret_cast<F>(dlsym(handle_, function));
    if (pointer == nullptr) throw std::runtime_error(name_ + " is too old: it has no " + function);
  }

 private:
  std::string name_;
  void* handle_ = nullptr;
};

cudaStream_t current_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return static_cast<cudaStream_t>(guard.getStream(device).native_handle());
}

CudaApi load_cuda() {
  const Library library("libcudart.so." + std::to_string(CUDART_VERSION / 1000));
  CudaApi api;
  library.find("cudaGetErrorString", api.error_string);
  library.find("cudaGetDevice", api.get_device);
  library.find("cudaSetDevice", api.set_device);
  library.find("cudaDeviceGetPCIBusId", api.pci_bus_id);
  library.find("cudaEventCreateWithFlags", api.event_create);
  library.find("cudaEventRecord", api.event_record);
  library.find("cudaEventQuery", api.event_query);
  library.find("cudaEventDestroy", api.event_destroy);
  library.find("cudaStreamIsCapturing", api.is_capturing);
  library.find("cudaStreamSynchronize", api.synchronize);
  library.find("cudaThreadExchangeStreamCaptureMode", api.exchange_capture_mode);
  api.current_stream = current_stream;
  return api;
}

}  // namespace

NcclApi load_nccl(const char* name) {
  const Library library(name);
  NcclApi api;
  library.find("ncclGetVersion", api.get_version);
  library.find("ncclGetErrorString", api.error_string);
  library.find("ncclGetLastError", api.last_error);
  library.find("ncclGetUniqueId", api.unique_id);
  library.find("ncclCommInitRankConfig", api.init_rank);
  library.find("ncclCommGetAsyncError", api.async_error);
  library.find("ncclCommFinalize", api.finalize);
  library.find("ncclCommDestroy", api.destroy);
  library.find("ncclCommAbort", api.abort);
  library.find("ncclGroupStart", api.group_start);
  library.find("ncclGroupEnd", api.group_end);
  library.find("ncclAllReduce", api.all_reduce);
  library.find("ncclAllGather", api.all_gather);
  library.find("ncclReduceScatter", api.reduce_scatter);
  library.find("ncclBroadcast", api.broadcast);
  library.find("ncclReduce", api.reduce);
  return api;
}

const Backend& loaded_backend() {
  // Never destroyed: communicators may outlive static objects.
  static const Backend* backend = [] {
    auto* loaded = new Backend();
    loaded->timeout = timeout_seconds();
    try {
      loaded->cuda = load_cuda();
      loaded->nccl = load_nccl("libnccl.so.2");
    } catch (const std::runtime_error& error) {
      loaded->problem = error.what();
    }
    return loaded;
  }();
  return *backend;
}

}  // namespace syncnorm::nccl
