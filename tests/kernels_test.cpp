// The vectorised kernels against the plain ones. One process.
#include "kernels/kernels.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>

#include "support/kernel_checks.h"

namespace syncnorm::kernels {
namespace {

using testing::Case;
using testing::Data;
using testing::relative_difference;

class Kernels : public ::testing::TestWithParam<Case> {
 protected:
  void compare(void (*check)(const KernelSet& set, const Data& data)) {
    testing::for_every_dtype(GetParam(), at::kCPU,
                             [&](const Data& data) { check(cpu_kernels(), data); });
  }
};

TEST_P(Kernels, Moments) { compare(testing::check_moments); }
TEST_P(Kernels, MomentsOfASum) { compare(testing::check_moments_of_a_sum); }
TEST_P(Kernels, Statistics) { compare(testing::check_statistics); }
TEST_P(Kernels, Apply) { compare(testing::check_apply); }
TEST_P(Kernels, Backward) { compare(testing::check_backward); }

INSTANTIATE_TEST_SUITE_P(ByCell, Kernels, ::testing::ValuesIn(testing::cases_by_cell()));
INSTANTIATE_TEST_SUITE_P(ByColumn, Kernels, ::testing::ValuesIn(testing::cases_by_column()));
/// So wide that rows are taken two at a time, with one left over.
INSTANTIATE_TEST_SUITE_P(ByWideColumn, Kernels, ::testing::Values(Case{{1, 7, 4099}, 1}));

/// Inputs of more than loops::kNearBytes, where data is asked for ahead or foreseen, and of more
/// than kCachedBytes, where results of whole lines are written past the caches; with runs that are
/// long and short, and rows and values left over from those taken together.
class FarKernels : public Kernels {
 protected:
  void compare(void (*check)(const KernelSet& set, const Data& data)) {
    const auto values = GetParam().cells.numel();
    std::vector<at::ScalarType> dtypes{at::kFloat};
    if (values < 3'000'000) dtypes = {at::kDouble};
    if (values < 1'500'000) dtypes = {at::kFloat, at::kHalf};
    for (const auto dtype : dtypes) check(cpu_kernels(), Data(GetParam(), dtype, true));
  }
};

TEST_P(FarKernels, Moments) { compare(testing::check_moments); }
TEST_P(FarKernels, MomentsOfASum) { compare(testing::check_moments_of_a_sum); }
TEST_P(FarKernels, Apply) { compare(testing::check_apply); }
TEST_P(FarKernels, Backward) { compare(testing::check_backward); }

INSTANTIATE_TEST_SUITE_P(Layouts, FarKernels,
                         ::testing::Values(Case{{4099, 257, 1}}, Case{{2, 261, 2053}},
                                           Case{{1, 531, 2051}, 3}, Case{{6273, 256, 1}},
                                           Case{{2, 260, 3128}}, Case{{1, 783, 2056}, 3},
                                           Case{{2, 260, 3127}}, Case{{12545, 256, 1}},
                                           Case{{2, 260, 6256}}, Case{{8, 1031, 199}},
                                           Case{{16, 1027, 208}}, Case{{1, 401, 4099}, 1},
                                           Case{{1, 783, 4112}, 1}));

/// Every bit pattern of the half types survives widening and narrowing, and floats round as ATen
/// rounds them.
TEST(KernelDtypes, RoundAsAtenDoes) {
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    const auto all = at::arange(0x10000, at::kInt).to(at::kShort).view(dtype);
    const auto zeros = at::zeros_like(all);
    NormLayout layout;
    layout.cells = {1, 1, all.numel()};
    layout.slots = 1;
    layout.by_column = true;
    NormInput sum(all, layout);
    sum.data = at::empty_like(all);
    auto sums = at::empty({2, 1}, at::kDouble);
    cpu_kernels().add_and_moments(all, zeros, sum, layout, {}, sums);
    const auto expected = all.to(at::kFloat), got = sum.data.to(at::kFloat);
    EXPECT_TRUE(at::allclose(got, expected, 0, 0, /*equal_nan=*/true)) << dtype;
    const auto halves = at::full_like(all, 0.7);
    cpu_kernels().add_and_moments(all, halves, sum, layout, {}, sums);
    EXPECT_TRUE(at::allclose(sum.data.to(at::kFloat), (all + halves).to(at::kFloat), 0, 0, true))
        << dtype;
  }
}

/// Sums about the mean keep a variance that sums about zero in float would lose, and squares beyond
/// float's range are summed in double.
TEST(KernelDtypes, MomentsKeepTheirDigits) {
  for (const double scale : {1e-30, 1e-3, 1.0, 1e18, 1e30})
    for (const double offset : {0.0, 1e4})
      for (const bool channels_last : {false, true}) {
        SCOPED_TRACE(::testing::Message() << scale << " offset " << offset << channels_last);
        const Data data({{300, 3, 50}, 0, channels_last}, at::kFloat, true);
        const auto x = ((data.x + offset) * scale).contiguous(data.x.suggest_memory_format());
        const NormInput input(x, data.layout);
        const auto center = x.to(at::kDouble).transpose(0, 1).reshape({3, -1}).mean(1);
        auto ours = at::empty_like(data.sums), plain = at::empty_like(data.sums);
        cpu_kernels().moments(input, data.layout, center, ours);
        reference_kernels().moments(input, data.layout, center, plain);
        EXPECT_LT(relative_difference(ours[1] / plain[1], at::ones_like(plain[1])), 1e-6);
      }
}

TEST(KernelThreads, SumsDoNotDependOnTheirNumber) {
  const int threads = at::get_num_threads();
  for (const auto& c :
       {Case{{9000, 37, 1}}, Case{{3, 37, 3000}}, Case{{1, 2, 300000}}, Case{{1, 2000, 300}, 1}}) {
    const Data data(c, at::kFloat, true);
    const auto run = [&](int count) {
      at::set_num_threads(count);
      const auto norm = data.norm();
      auto moments = at::empty_like(data.sums), slots = at::empty_like(data.sums);
      auto affine = at::empty(data.layout.affine_shape(), at::kDouble);
      cpu_kernels().moments(norm.input, data.layout, {}, moments);
      cpu_kernels().backward_sums(norm, data.dy, slots, affine);
      at::set_num_threads(threads);
      return at::cat({moments.flatten(), slots.flatten(), affine.flatten()});
    };
    EXPECT_TRUE(at::equal(run(1), run(3)));
  }
}

TEST(KernelChoice, ByDeviceUnlessToldOtherwise) {
  const bool plain = std::getenv("SYNCNORM_KERNELS") != nullptr;
  EXPECT_EQ(&kernels_for(at::kCPU), plain ? &reference_kernels() : &cpu_kernels());
}

}  // namespace
}  // namespace syncnorm::kernels
