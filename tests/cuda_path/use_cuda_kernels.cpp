// Everything in this program runs on the CUDA kernels, over the emulated device.
#include "kernels/cuda/services.h"
#include "kernels/kernels.h"

namespace syncnorm::kernels {
namespace cuda {

// Few, so that several blocks share a cell already at the sizes of tests.
int multiprocessors(c10::Device) { return 3; }
Stream current_stream(c10::Device) { return nullptr; }
const char* error_text(Status) { return "refused"; }
uint64_t captured_graph(Stream) { return 0; }
DeviceGuard::DeviceGuard(c10::Device) {}
DeviceGuard::~DeviceGuard() = default;

}  // namespace cuda

namespace {

const ScopedKernels everywhere(*cuda_kernels());

}  // namespace
}  // namespace syncnorm::kernels
