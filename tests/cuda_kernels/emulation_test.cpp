// The emulation itself: that it finds mistakes, and rounds as devices do.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <vector>

#include "cuda_kernels/broken.cuh"
#include "cuda_kernels/problem.h"

namespace syncnorm::kernels::cuda::testing {
namespace {

TEST(CudaEmulation, FindsMissingBarriers) {
  double sum = 0;
  for (const auto order : {cuda_emulation::Order::forward, cuda_emulation::Order::shuffled}) {
    cuda_emulation::set_order(order);
    EXPECT_EQ(sum_without_barrier(&sum), cudaSuccess);
    EXPECT_TRUE(std::isnan(sum));
    EXPECT_EQ(sum_with_barrier(&sum), cudaSuccess);
    EXPECT_EQ(sum, kBrokenThreads * (kBrokenThreads - 1) / 2);
  }
}

TEST(CudaEmulationDeathTest, FindsThreadsThatPart) {
  cuda_emulation::set_order(cuda_emulation::Order::forward);
  EXPECT_DEATH(return_before_barrier(),
               "kernel .*return_before.*block .0, 0, 0., thread .* waits for ever at .*broken.cu:"
               ".* has returned");
  EXPECT_DEATH(wait_at_two_barriers(), "kernel .*wait_at_two.* is at the barrier at .*others at");
  EXPECT_DEATH(shuffle_half_a_warp(), "kernel .*shuffle_half.* waits for ever at .*broken.cu:");
  EXPECT_DEATH(shuffle_beyond_mask(), "shuffles with a lane that its mask leaves out");
}

TEST(CudaEmulationDeathTest, FindsAccessesOutOfBounds) {
  const std::vector<float> from(kBrokenThreads);
  std::vector<float> to(kBrokenThreads);
  EXPECT_DEATH(read_beyond(from.data(), to.data()), "AddressSanitizer: heap-buffer-overflow");
  EXPECT_DEATH(write_beyond_shared(), "AddressSanitizer: use-after-poison");
}

TEST(CudaEmulation, RefusesLaunchesThatDevicesRefuse) {
  const auto launch = [](dim3 grid, dim3 block, size_t shared) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    return cudaLaunchKernelEx(&config, static_cast<void (*)()>([] {}));
  };
  EXPECT_EQ(launch(1, 1024, 48 * 1024), cudaSuccess);
  EXPECT_EQ(launch(70000, 1, 0), cudaSuccess);
  EXPECT_EQ(launch(0, 32, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(1, 1025, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch({1, 65536}, 32, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(launch(1, 32, 48 * 1024 + 1), cudaErrorInvalidValue);
}

float bits_as_float(uint32_t bits) { return __int_as_float(static_cast<int>(bits)); }

// Every value that a half type holds comes back, and halfway between two lies the even one.
template <typename Half, typename Widen, typename Narrow>
void expect_rounding(uint16_t infinity, Widen&& widen, Narrow&& narrow) {
  for (uint32_t bits = 0; bits < infinity; ++bits) {
    const auto low = static_cast<uint16_t>(bits), high = static_cast<uint16_t>(bits + 1);
    const float value = widen(Half{low});
    ASSERT_EQ(narrow(value).bits, low);
    ASSERT_EQ(narrow(-value).bits, low | 0x8000);
    if (high == infinity) break;
    const float next = widen(Half{high});
    ASSERT_LT(value, next);
    const float half = value + (next - value) / 2;
    ASSERT_EQ(narrow(half).bits, low % 2 == 0 ? low : high);
    ASSERT_EQ(narrow(std::nextafter(half, 0.f)).bits, low);
    ASSERT_EQ(narrow(std::nextafter(half, INFINITY)).bits, high);
  }
  EXPECT_EQ(narrow(INFINITY).bits, infinity);
  EXPECT_EQ(narrow(-INFINITY).bits, infinity | 0x8000);
  EXPECT_TRUE(std::isinf(widen(Half{infinity})));
  for (const uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7f800001u}) {
    EXPECT_EQ(narrow(bits_as_float(bits)).bits, 0x7fff);
    EXPECT_TRUE(std::isnan(widen(narrow(bits_as_float(bits)))));
  }
}

TEST(CudaEmulation, RoundsHalfLikeDevices) {
  expect_rounding<__half>(0x7c00, __half2float, __float2half_rn);
  EXPECT_EQ(__half2float({0x3c00}), 1);
  EXPECT_EQ(__half2float({0x7bff}), 65504);
  EXPECT_EQ(__half2float({1}), 0x1p-24f);
  EXPECT_EQ(__float2half_rn(65519.99f).bits, 0x7bff);
  EXPECT_EQ(__float2half_rn(65520).bits, 0x7c00);
}

TEST(CudaEmulation, RoundsBfloat16LikeDevices) {
  expect_rounding<__nv_bfloat16>(0x7f80, __bfloat162float, __float2bfloat16_rn);
  EXPECT_EQ(__bfloat162float({0x3f80}), 1);
  EXPECT_EQ(__float2bfloat16_rn(3.4e38f).bits, 0x7f80);
}

}  // namespace
}  // namespace syncnorm::kernels::cuda::testing
