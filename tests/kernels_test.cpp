// The vectorised kernels against the plain ones, in every layout and dtype, with odd sizes. One
// process.
#include "kernels/kernels.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>

#include "support/world.h"

namespace syncnorm::kernels {
namespace {

using testing::relative_difference;

struct Case {
  CellLayout cells;
  int64_t affine_rows = 0;  ///< by column; 0: by cell
  bool channels_last = false;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.cells.outer << " x " << c.cells.cells << " x " << c.cells.inner
       << (c.channels_last ? " channels-last" : "");
  if (c.affine_rows > 0) *out << " by " << c.affine_rows;
}

/// A norm's tensors of one case, the same for both kernel sets.
struct Data {
  Data(const Case& c, at::ScalarType type, bool centered) : dtype(type) {
    torch::manual_seed(c.cells.numel() + 7);
    layout.cells = c.cells;
    layout.slots = c.cells.cells;
    layout.centered = centered;
    layout.by_column = c.affine_rows > 0;
    layout.affine_rows = layout.by_column ? c.affine_rows : c.cells.cells;
    layout.keeps_format = c.channels_last;
    layout.count.all = static_cast<double>(std::max<int64_t>(c.cells.outer * c.cells.inner, 1));
    x = tensor() + 3;
    dy = tensor();
    residual = tensor();
    const auto shape = layout.affine_shape();
    weight = at::randn(at::IntArrayRef(shape).slice(1), options());
    bias = at::randn(at::IntArrayRef(shape).slice(1), options());
    center = at::randn({layout.slots}, at::kDouble) + 3;
    statistics = at::rand({kStatisticsRows, layout.slots}, at::kDouble) + 0.5;
    sums = at::randn({layout.sums(), layout.slots}, at::kDouble);
  }

  at::TensorOptions options() const { return at::TensorOptions().dtype(dtype); }
  at::Tensor tensor() const {
    const auto& cells = layout.cells;
    if (!layout.keeps_format) return at::randn({cells.outer, cells.cells, cells.inner}, options());
    return at::randn({cells.outer, cells.cells, cells.inner, 1}, options())
        .contiguous(at::MemoryFormat::ChannelsLast);
  }
  Norm norm() const {
    return {NormInput(x, layout), layout, statistics,  weight, bias,
            at::Tensor(),         false,  at::Tensor()};
  }

  at::ScalarType dtype;
  NormLayout layout;
  at::Tensor x, dy, residual, weight, bias, center, statistics, sums;
};

/// Lanes of float add at most some dozens of values before they are added in double: a few ULPs of
/// float of the largest sum. Double keeps to rounding of up to 1e5 terms of mixed sign.
double sum_tolerance(at::ScalarType dtype) { return dtype == at::kDouble ? 1e-12 : 3e-6; }

/// Coefficients are rounded to the dtype of computation, and results to the input's.
double pass_tolerance(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 4e-15;
    case at::kFloat:
      return 16 * 0x1p-24;
    case at::kHalf:
      return 2 * 0x1p-11;
    default:
      return 2 * 0x1p-8;
  }
}

class Kernels : public ::testing::TestWithParam<Case> {
 protected:
  template <typename Check>
  void for_every_dtype(Check&& check) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
      for (const bool centered : {true, false}) {
        SCOPED_TRACE(::testing::Message() << dtype << (centered ? " centered" : ""));
        check(Data(GetParam(), dtype, centered));
      }
  }
};

TEST_P(Kernels, Moments) {
  for_every_dtype([](const Data& data) {
    const NormInput input(data.x, data.layout);
    auto ours = at::empty_like(data.sums), plain = at::empty_like(data.sums);
    for (const auto& center : {data.layout.centered ? data.center : at::Tensor(), at::Tensor()}) {
      cpu_kernels().moments(input, data.layout, center, ours);
      reference_kernels().moments(input, data.layout, center, plain);
      EXPECT_LT(relative_difference(ours, plain), sum_tolerance(data.dtype));
    }
  });
}

TEST_P(Kernels, MomentsOfASum) {
  for_every_dtype([](const Data& data) {
    const NormInput x(data.x, data.layout), residual(data.residual, data.layout);
    NormInput sum = x, plain_sum = x;
    sum.data = x.empty_like();
    plain_sum.data = x.empty_like();
    auto ours = at::empty_like(data.sums), plain = at::empty_like(data.sums);
    cpu_kernels().add_and_moments(x.data, residual.data, sum, data.layout, {}, ours);
    reference_kernels().add_and_moments(x.data, residual.data, plain_sum, data.layout, {}, plain);
    EXPECT_TRUE(at::equal(sum.data, plain_sum.data));
    EXPECT_LT(relative_difference(ours, plain), sum_tolerance(data.dtype));
  });
}

TEST_P(Kernels, Statistics) {
  for_every_dtype([](const Data& data) {
    auto ours = at::empty_like(data.statistics), plain = at::empty_like(data.statistics);
    const Precision precision{1e-5, 1e-5, 4};
    const auto sums = data.sums.abs() * data.layout.count.all;
    const auto lost = [&](const KernelSet& set, const at::Tensor& statistics) {
      return set.finish(sums, data.layout, data.center, data.layout.count, precision, statistics);
    };
    EXPECT_EQ(lost(cpu_kernels(), ours), lost(reference_kernels(), plain));
    EXPECT_LT(relative_difference(ours, plain), 1e-14);
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      const auto options = at::TensorOptions().dtype(dtype);
      auto mean = at::ones({data.layout.slots}, options), var = at::ones_like(mean);
      auto plain_mean = mean.clone(), plain_var = var.clone();
      cpu_kernels().update_running(plain, 5, 0.3, mean, var);
      reference_kernels().update_running(plain, 5, 0.3, plain_mean, plain_var);
      EXPECT_LT(relative_difference(mean, plain_mean), pass_tolerance(dtype));
      EXPECT_LT(relative_difference(var, plain_var), pass_tolerance(dtype));
    }
  });
}

TEST_P(Kernels, Apply) {
  for_every_dtype([](const Data& data) {
    for (const int given : {0, 1, 2, 3, 4}) {
      if (data.layout.by_column && given > 2) continue;
      SCOPED_TRACE(given);
      auto norm = data.norm();
      if (given < 1) norm.weight = at::Tensor();
      if (given < 2) norm.bias = at::Tensor();
      norm.relu = given > 2;
      if (given > 3) norm.residual = norm.input.match(data.residual);
      auto ours = norm.input.empty_like(), plain = norm.input.empty_like();
      cpu_kernels().apply(norm, ours);
      reference_kernels().apply(norm, plain);
      EXPECT_LT(relative_difference(ours, plain), pass_tolerance(data.dtype));
    }
  });
}

TEST_P(Kernels, Backward) {
  for_every_dtype([](const Data& data) {
    for (const int variant : {0, 1, 2, 3}) {
      if (data.layout.by_column && variant > 1) continue;
      SCOPED_TRACE(variant);
      auto norm = data.norm();
      if (variant == 0) norm.weight = norm.bias = at::Tensor();
      norm.relu = variant > 1;
      if (variant == 3) norm.output = norm.input.match(data.residual);
      const auto dy = norm.input.match(data.dy);
      auto slots = at::empty_like(data.sums), plain_slots = at::empty_like(data.sums);
      auto affine = at::empty(data.layout.affine_shape(), at::kDouble);
      auto plain_affine = at::empty_like(affine);
      cpu_kernels().backward_sums(norm, dy, slots, affine);
      reference_kernels().backward_sums(norm, dy, plain_slots, plain_affine);
      EXPECT_LT(relative_difference(slots, plain_slots), sum_tolerance(data.dtype));
      EXPECT_LT(relative_difference(affine, plain_affine), sum_tolerance(data.dtype));
      cpu_kernels().backward_sums(norm, dy, slots, {});
      EXPECT_LT(relative_difference(slots, plain_slots), sum_tolerance(data.dtype));

      BackwardOutputs ours{norm.input.empty_like(), {}, {}}, plain = ours;
      plain.dx = norm.input.empty_like();
      if (data.layout.by_column && variant == 1) ours.extra = plain.extra = dy;
      if (norm.relu) {
        ours.dresidual = norm.input.empty_like();
        plain.dresidual = norm.input.empty_like();
      }
      cpu_kernels().backward_apply(norm, dy, data.sums, data.layout.count, ours);
      reference_kernels().backward_apply(norm, dy, data.sums, data.layout.count, plain);
      EXPECT_LT(relative_difference(ours.dx, plain.dx), pass_tolerance(data.dtype));
      if (!norm.relu) continue;
      EXPECT_LT(relative_difference(ours.dresidual, plain.dresidual), pass_tolerance(data.dtype));
      const BackwardOutputs alone{{}, at::zeros_like(ours.dresidual), {}};
      cpu_kernels().backward_apply(norm, dy, data.sums, data.layout.count, alone);
      EXPECT_TRUE(at::equal(alone.dresidual, ours.dresidual));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    ByCell, Kernels,
    ::testing::Values(Case{{3, 5, 7}}, Case{{1, 1, 1}}, Case{{2, 3, 1}}, Case{{1000, 3, 1}},
                      Case{{5000, 65, 1}}, Case{{4, 130, 33}}, Case{{0, 4, 1}}, Case{{0, 4, 9}},
                      Case{{3, 4, 0}}, Case{{70000, 2, 1}}, Case{{1, 2, 140001}}, Case{{7, 16, 16}},
                      Case{{2, 8, 15}}, Case{{3, 5, 7}, 0, true}, Case{{67, 24, 5}, 0, true},
                      Case{{2, 33, 129}, 0, true}));
INSTANTIATE_TEST_SUITE_P(ByColumn, Kernels,
                         ::testing::Values(Case{{1, 5, 7}, 1}, Case{{1, 5, 1}, 1},
                                           Case{{1, 0, 8}, 1}, Case{{1, 6, 0}, 1},
                                           Case{{1, 12, 17}, 3}, Case{{1, 3000, 40}, 1},
                                           Case{{1, 8, 33}, 8}, Case{{1, 4, 70001}, 2},
                                           Case{{1, 70000, 2}, 1}, Case{{1, 520, 9}, 4}));

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
