// The vectorised kernels against the plain ones, in both memory layouts, with odd sizes. One
// process.
#include "kernels/kernels.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>

#include "support/world.h"

namespace syncnorm::kernels {
namespace {

using testing::relative_difference;

// The sums differ by their order of addition only: double rounding of up to 1e5 terms of mixed
// sign.
constexpr double kSums = 1e-12;

double pass_tolerance(at::ScalarType dtype) { return dtype == at::kDouble ? 1e-15 : 4 * 0x1p-24; }

TEST(Kernels, CpuEqualsReference) {
  const std::vector<SlotLayout> layouts = {
      {3, 5, 7},     {1, 1, 1},     {2, 3, 1},   {1000, 3, 1}, {5000, 65, 1},
      {4, 130, 33},  {2, 2, 100},   {0, 4, 1},   {0, 4, 9},    {3, 4, 0},
      {70000, 2, 1}, {1, 2, 70001}, {7, 16, 16}, {2, 8, 15},   {1, 3000, 40}};
  for (const auto& layout : layouts) {
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      SCOPED_TRACE(::testing::Message() << layout.outer << " x " << layout.slots << " x "
                                        << layout.inner << " " << dtype);
      torch::manual_seed(layout.numel());
      const auto options = at::TensorOptions().dtype(dtype);
      const auto x = at::randn({layout.numel()}, options) + 3;
      const auto dy = at::randn({layout.numel()}, options);
      const auto center = at::randn({layout.slots}, at::kDouble) + 3;
      const auto k = at::randn({5, layout.slots}, options);
      const auto affine = at::randn({3, layout.slots}, at::kDouble);
      const auto& ours = cpu_kernels();
      const auto& plain = reference_kernels();
      EXPECT_LT(
          relative_difference(ours.moments(x, layout, center), plain.moments(x, layout, center)),
          kSums);
      EXPECT_LT(relative_difference(ours.backward_sums(x, dy, layout, affine, {}).slots,
                                    plain.backward_sums(x, dy, layout, affine, {}).slots),
                kSums);
      auto y = at::empty_like(x);
      auto plain_y = at::empty_like(x);
      ours.apply(x, layout, k.slice(0, 0, 3).contiguous(), {}, y);
      plain.apply(x, layout, k.slice(0, 0, 3).contiguous(), {}, plain_y);
      EXPECT_LT(relative_difference(y, plain_y), pass_tolerance(dtype));
      ours.backward_apply(x, dy, layout, k, {}, y);
      plain.backward_apply(x, dy, layout, k, {}, plain_y);
      EXPECT_LT(relative_difference(y, plain_y), pass_tolerance(dtype));
    }
  }
}

TEST(Kernels, ColumnsEqualReference) {
  struct Case {
    SlotLayout layout;
    int64_t rows;
  };
  const std::vector<Case> cases = {{{1, 5, 7}, 1},  {{1, 5, 1}, 1},     {{1, 0, 8}, 1},
                                   {{1, 6, 0}, 1},  {{1, 12, 17}, 3},   {{1, 3000, 40}, 1},
                                   {{1, 8, 33}, 8}, {{1, 4, 70001}, 2}, {{1, 70000, 2}, 1}};
  for (const auto& [layout, rows] : cases)
    for (const auto dtype : {at::kFloat, at::kDouble})
      for (const int given : {0, 1, 2}) {
        SCOPED_TRACE(::testing::Message() << layout.slots << " x " << layout.inner << " by " << rows
                                          << " " << dtype << ", affine " << given);
        torch::manual_seed(layout.numel());
        const auto options = at::TensorOptions().dtype(dtype);
        const auto x = at::randn({layout.numel()}, options) + 3;
        const auto dy = at::randn({layout.numel()}, options);
        const auto k = at::randn({5, layout.slots}, options);
        const auto affine = at::randn({3, layout.slots}, at::kDouble);
        Columns columns;
        columns.rows = rows;
        if (given > 0) columns.weight = at::randn({rows, layout.inner}, options);
        if (given > 1) columns.bias = at::randn({rows, layout.inner}, options);
        const auto& ours = cpu_kernels();
        const auto& plain = reference_kernels();
        const auto sums = ours.backward_sums(x, dy, layout, affine, columns);
        const auto expected = plain.backward_sums(x, dy, layout, affine, columns);
        EXPECT_LT(relative_difference(sums.slots, expected.slots), kSums);
        EXPECT_LT(relative_difference(sums.columns, expected.columns), kSums);
        auto y = at::empty_like(x);
        auto plain_y = at::empty_like(x);
        ours.apply(x, layout, k.slice(0, 0, 3).contiguous(), columns, y);
        plain.apply(x, layout, k.slice(0, 0, 3).contiguous(), columns, plain_y);
        EXPECT_LT(relative_difference(y, plain_y), pass_tolerance(dtype));
        ours.backward_apply(x, dy, layout, k, columns, y);
        plain.backward_apply(x, dy, layout, k, columns, plain_y);
        EXPECT_LT(relative_difference(y, plain_y), pass_tolerance(dtype));
      }
}

TEST(Kernels, SumsDoNotDependOnTheThreadCount) {
  const int threads = at::get_num_threads();
  const SlotLayout rows{9000, 37, 1};
  const SlotLayout runs{3, 37, 3000};
  for (const auto& layout : {rows, runs}) {
    const auto x = at::randn({layout.numel()});
    const auto center = at::zeros({layout.slots}, at::kDouble);
    at::set_num_threads(1);
    const auto one = cpu_kernels().moments(x, layout, center);
    at::set_num_threads(3);
    const auto three = cpu_kernels().moments(x, layout, center);
    at::set_num_threads(threads);
    EXPECT_TRUE(at::equal(one, three));
  }
}

TEST(Kernels, ChosenByDeviceUnlessToldOtherwise) {
  const bool plain = std::getenv("SYNCNORM_KERNELS") != nullptr;
  EXPECT_EQ(&kernels_for(at::kCPU), plain ? &reference_kernels() : &cpu_kernels());
}

}  // namespace
}  // namespace syncnorm::kernels
