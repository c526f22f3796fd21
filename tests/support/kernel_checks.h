#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <vector>

#include "kernels/kernels.h"
#include "support/world.h"

/// A set of kernels against the plain ones, in every layout and dtype, with odd sizes.
namespace syncnorm::kernels::testing {

using syncnorm::testing::relative_difference;

struct Case {
  CellLayout cells;
  int64_t affine_rows = 0;  ///< by column; 0: by cell
  bool channels_last = false;
};

inline void PrintTo(const Case& c, std::ostream* out) {
  *out << c.cells.outer << " x " << c.cells.cells << " x " << c.cells.inner
       << (c.channels_last ? " channels-last" : "");
  if (c.affine_rows > 0) *out << " by " << c.affine_rows;
}

/// A norm's tensors of one case, the same for both kernel sets and on every device.
struct Data {
  Data(const Case& c, at::ScalarType type, bool centered, c10::Device where = at::kCPU)
      : dtype(type), device(where) {
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
    weight = at::randn(at::IntArrayRef(shape).slice(1), dtype).to(device);
    bias = at::randn(at::IntArrayRef(shape).slice(1), dtype).to(device);
    center = at::randn({layout.slots}, at::kDouble).to(device) + 3;
    statistics = at::rand({kStatisticsRows, layout.slots}, at::kDouble).to(device) + 0.5;
    sums = at::randn({layout.sums(), layout.slots}, at::kDouble).to(device);
  }

  at::Tensor tensor() const {
    const auto& cells = layout.cells;
    if (!layout.keeps_format)
      return at::randn({cells.outer, cells.cells, cells.inner}, dtype).to(device);
    return at::randn({cells.outer, cells.cells, cells.inner, 1}, dtype)
        .contiguous(at::MemoryFormat::ChannelsLast)
        .to(device);
  }
  Norm norm() const {
    return {NormInput(x, layout), layout, statistics,  weight, bias,
            at::Tensor(),         false,  at::Tensor()};
  }

  at::ScalarType dtype;
  c10::Device device;
  NormLayout layout;
  at::Tensor x, dy, residual, weight, bias, center, statistics, sums;
};

/// Lanes of float add at most some dozens of values before they are added in double: a few ULPs of
/// float of the largest sum. Double keeps to rounding of up to 1e5 terms of mixed sign.
inline double sum_tolerance(at::ScalarType dtype) { return dtype == at::kDouble ? 1e-12 : 3e-6; }

/// Coefficients are rounded to the dtype of computation, and results to the input's.
inline double pass_tolerance(at::ScalarType dtype) {
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

/// Calls `check(Data)` for a case in every dtype, centered or not.
template <typename Check>
void for_every_dtype(const Case& c, c10::Device device, Check&& check) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf})
    for (const bool centered : {true, false}) {
      SCOPED_TRACE(::testing::Message() << dtype << (centered ? " centered" : ""));
      check(Data(c, dtype, centered, device));
    }
}

/// Memory like that of `values` in which whatever is not written shows.
inline at::Tensor unset(const at::Tensor& values) {
  return at::full_like(values, std::numeric_limits<double>::quiet_NaN());
}

inline void check_moments(const KernelSet& set, const Data& data) {
  const NormInput input(data.x, data.layout);
  auto ours = unset(data.sums), plain = at::empty_like(data.sums);
  for (const auto& center : {data.layout.centered ? data.center : at::Tensor(), at::Tensor()}) {
    set.moments(input, data.layout, center, ours);
    reference_kernels().moments(input, data.layout, center, plain);
    EXPECT_LT(relative_difference(ours, plain), sum_tolerance(data.dtype));
  }
}

inline void check_moments_of_a_sum(const KernelSet& set, const Data& data) {
  const NormInput x(data.x, data.layout), residual(data.residual, data.layout);
  NormInput sum = x, plain_sum = x;
  sum.data = x.empty_like();
  plain_sum.data = x.empty_like();
  auto ours = unset(data.sums), plain = at::empty_like(data.sums);
  set.add_and_moments(x.data, residual.data, sum, data.layout, {}, ours);
  reference_kernels().add_and_moments(x.data, residual.data, plain_sum, data.layout, {}, plain);
  EXPECT_TRUE(at::equal(sum.data, plain_sum.data));
  EXPECT_LT(relative_difference(ours, plain), sum_tolerance(data.dtype));
}

inline void check_statistics(const KernelSet& set, const Data& data) {
  auto ours = unset(data.statistics), plain = at::empty_like(data.statistics);
  const Precision precision{1e-5, 1e-5, 4};
  const auto sums = data.sums.abs() * data.layout.count.all;
  const auto lost = [&](const KernelSet& kernels, const at::Tensor& statistics) {
    return kernels.finish(sums, data.layout, data.center, data.layout.count, precision, statistics);
  };
  EXPECT_EQ(lost(set, ours), lost(reference_kernels(), plain));
  EXPECT_LT(relative_difference(ours, plain), 1e-14);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const auto options = at::TensorOptions().dtype(dtype).device(data.device);
    auto mean = at::ones({data.layout.slots}, options), var = at::ones_like(mean);
    auto plain_mean = mean.clone(), plain_var = var.clone();
    set.update_running(plain, 5, 0.3, mean, var);
    reference_kernels().update_running(plain, 5, 0.3, plain_mean, plain_var);
    EXPECT_LT(relative_difference(mean, plain_mean), pass_tolerance(dtype));
    EXPECT_LT(relative_difference(var, plain_var), pass_tolerance(dtype));
  }
}

inline void check_apply(const KernelSet& set, const Data& data) {
  for (const int given : {0, 1, 2, 3, 4}) {
    if (data.layout.by_column && given > 2) continue;
    SCOPED_TRACE(given);
    auto norm = data.norm();
    if (given < 1) norm.weight = at::Tensor();
    if (given < 2) norm.bias = at::Tensor();
    norm.relu = given > 2;
    if (given > 3) norm.residual = norm.input.match(data.residual);
    auto ours = norm.input.empty_like(), plain = norm.input.empty_like();
    set.apply(norm, ours);
    reference_kernels().apply(norm, plain);
    EXPECT_LT(relative_difference(ours, plain), pass_tolerance(data.dtype));
  }
}

/// So near the ReLU's bend rounding decides what passes: such elements get no gradient.
inline at::Tensor near_bend(Norm norm) {
  norm.relu = false;
  const auto y = norm.input.empty_like();
  reference_kernels().apply(norm, y);
  return y.abs() < 1e-2;
}

inline void check_backward(const KernelSet& set, const Data& data) {
  for (const int variant : {0, 1, 2, 3, 4}) {
    if (data.layout.by_column && variant > 2) continue;
    SCOPED_TRACE(variant);
    auto norm = data.norm();
    if (variant < 1) norm.weight = at::Tensor();
    if (variant < 2) norm.bias = at::Tensor();
    norm.relu = variant > 2;
    if (variant == 4) norm.output = norm.input.match(data.residual);
    auto dy = norm.input.match(data.dy);
    if (variant == 3) dy = dy.masked_fill(near_bend(norm), 0);
    auto slots = unset(data.sums), plain_slots = at::empty_like(slots);
    auto affine = unset(at::empty(data.layout.affine_shape(), data.sums.options()));
    auto plain_affine = at::empty_like(affine);
    set.backward_sums(norm, dy, slots, affine);
    reference_kernels().backward_sums(norm, dy, plain_slots, plain_affine);
    EXPECT_LT(relative_difference(slots, plain_slots), sum_tolerance(data.dtype));
    const bool left_out =
        data.layout.by_column && !norm.bias.defined() && affine[0].abs().sum().item<double>() == 0;
    if (left_out) plain_affine[0].zero_();
    EXPECT_LT(relative_difference(affine, plain_affine), sum_tolerance(data.dtype));
    set.backward_sums(norm, dy, slots, {});
    EXPECT_LT(relative_difference(slots, plain_slots), sum_tolerance(data.dtype));

    BackwardOutputs ours{norm.input.empty_like(), {}, {}}, plain = ours;
    plain.dx = norm.input.empty_like();
    if (data.layout.by_column && variant > 0) ours.extra = plain.extra = dy;
    if (norm.relu) {
      ours.dresidual = norm.input.empty_like();
      plain.dresidual = norm.input.empty_like();
    }
    set.backward_apply(norm, dy, data.sums, data.layout.count, ours);
    reference_kernels().backward_apply(norm, dy, data.sums, data.layout.count, plain);
    EXPECT_LT(relative_difference(ours.dx, plain.dx), pass_tolerance(data.dtype));
    if (!norm.relu) continue;
    EXPECT_LT(relative_difference(ours.dresidual, plain.dresidual), pass_tolerance(data.dtype));
    const BackwardOutputs alone{{}, at::zeros_like(ours.dresidual), {}};
    set.backward_apply(norm, dy, data.sums, data.layout.count, alone);
    EXPECT_TRUE(at::equal(alone.dresidual, ours.dresidual));
  }
}

/// Batch norm's cases, contiguous and channels-last.
inline std::vector<Case> cases_by_cell() {
  return {{{3, 5, 7}},
          {{1, 1, 1}},
          {{2, 3, 1}},
          {{1000, 3, 1}},
          {{5000, 65, 1}},
          {{4, 130, 33}},
          {{0, 4, 1}},
          {{0, 4, 9}},
          {{3, 4, 0}},
          {{70000, 2, 1}},
          {{1, 2, 140001}},
          {{7, 16, 16}},
          {{2, 8, 15}},
          {{3, 5, 7}, 0, true},
          {{67, 24, 5}, 0, true},
          {{2, 33, 129}, 0, true}};
}

/// Rows.
inline std::vector<Case> cases_by_column() {
  return {{{1, 5, 7}, 1},     {{1, 5, 1}, 1},     {{1, 0, 8}, 1},  {{1, 6, 0}, 1},
          {{1, 12, 17}, 3},   {{1, 3000, 40}, 1}, {{1, 8, 33}, 8}, {{1, 4, 70001}, 2},
          {{1, 70000, 2}, 1}, {{1, 520, 9}, 4}};
}

}  // namespace syncnorm::kernels::testing
