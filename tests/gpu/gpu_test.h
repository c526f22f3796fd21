#pragma once

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>

#include <optional>

#include "kernels/kernels.h"
#include "syncnorm/environment.h"

namespace syncnorm::testing {

/// `Base`, for tests that need a GPU: they are skipped where there is none. The rank's GPU is the
/// current one while they run.
template <typename Base = ::testing::Test>
class OnGpu : public Base {
 protected:
  void SetUp() override {
    Base::SetUp();
    if (device.is_cpu()) GTEST_SKIP() << "no GPU";
    ASSERT_NE(kernels::cuda_kernels(), nullptr) << "the library was built without CUDA kernels";
    guard_.emplace(device);
  }
  void TearDown() override {
    guard_.reset();
    Base::TearDown();
  }

  static int gpus() { return static_cast<int>(at::detail::getCUDAHooks().deviceCount()); }
  /// Whether each rank of the node has a GPU of its own.
  static bool gpu_for_each_rank() { return gpus() >= Environment::current()->local_size(); }

  const c10::Device device = Environment::current()->device();

 private:
  std::optional<c10::DeviceGuard> guard_;
};

}  // namespace syncnorm::testing
