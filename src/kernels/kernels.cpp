#include "kernels/kernels.h"

#include <atomic>
#include <cstdlib>
#include <string>

namespace syncnorm::kernels {
namespace {

std::atomic<const KernelSet*> chosen{nullptr};  // backward runs on other threads too

}  // namespace

ScopedKernels::ScopedKernels(const KernelSet& set) { chosen = &set; }
ScopedKernels::~ScopedKernels() { chosen = nullptr; }

const KernelSet& kernels_for(c10::Device device) {
  static const bool reference = [] {
    const char* text = std::getenv("SYNCNORM_KERNELS");
    const std::string choice = text == nullptr ? "" : text;
    TORCH_CHECK(choice.empty() || choice == "reference",
                "SYNCNORM_KERNELS must be 'reference' or unset, got '", choice, "'");
    return choice == "reference";
  }();
  if (const KernelSet* set = chosen) return *set;
  if (reference) return reference_kernels();
  if (device.is_cpu()) return cpu_kernels();
  if (device.is_cuda() && cuda_kernels() != nullptr) return *cuda_kernels();
  return reference_kernels();
}

}  // namespace syncnorm::kernels
