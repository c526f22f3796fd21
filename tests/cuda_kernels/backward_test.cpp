// Both passes of the backward.
#include <cuda_runtime.h>

#include <cmath>

#include "cuda_kernels/problem.h"

namespace syncnorm::kernels::cuda::testing {
namespace {

/// A problem with what both passes read.
struct Pass {
  Pass(const Shape& shape, const Variant& variant)
      : problem(shape, variant),
        weighted(!variant.one_in(1, 4)),
        biased(weighted && !variant.one_in(2, 4)),
        parameters(variant.one_in(3, 2) ? Dtype::float32 : variant.dtype),
        gate(shape.by_column ? Gate::open : static_cast<Gate>(variant.pick(4, 3))),
        x(problem.x, variant.dtype, variant.offset(0)),
        dy(problem.dy, variant.dtype, variant.offset(1)),
        output(problem.random(shape.elements()), variant.dtype, variant.offset(2)),
        weight(problem.weight, parameters),
        bias(problem.bias, parameters),
        statistics(problem.statistics, Dtype::float64) {
    of.layout = problem.layout();
    of.dtype = variant.dtype;
    of.x = x.data();
    of.dy = dy.data();
    of.output = gate == Gate::output ? output.data() : nullptr;
    of.gate = gate;
    if (weighted) of.weight = weight.values();
    if (biased) of.bias = bias.values();
    of.statistics = statistics.doubles();
  }

  double mean(int64_t slot) const { return problem.statistics[slot]; }
  double rstd(int64_t slot) const { return problem.statistics[2 * problem.slots + slot]; }
  int64_t slot_of(int64_t i) const { return problem.slot_of(problem.cell_of(i)); }
  double xhat(int64_t i) const { return (problem.x[i] - mean(slot_of(i))) * rstd(slot_of(i)); }
  double weight_at(int64_t i) const { return weighted ? weight[problem.affine_of(i)] : 1; }
  double gradient(int64_t i) const {
    const double y = xhat(i) * weight_at(i) + (biased ? bias[problem.affine_of(i)] : 0);
    if (gate == Gate::recompute && y <= 0) return 0;
    if (gate == Gate::output && output[i] <= 0) return 0;
    return problem.dy[i];
  }

  Problem problem;
  bool weighted, biased;
  Dtype parameters;
  Gate gate;
  Buffer x, dy, output, weight, bias, statistics;
  Backward of;
};

TEST(CudaBackwardSums, AreThoseOfPlainLoops) {
  for_all(all_shapes(), [](const Shape& shape, const Variant& variant) {
    const Pass pass(shape, variant);
    const auto& problem = pass.problem;
    std::vector<double> slots(2 * problem.slots), slots_scale(2 * problem.slots);
    std::vector<double> affine(2 * problem.affine_size), affine_scale(2 * problem.affine_size);
    for (int64_t i = 0; i < shape.elements(); ++i) {
      const double g = pass.gradient(i), xhat = pass.xhat(i), w = pass.weight_at(i);
      const double terms[] = {g, g * xhat};
      for (int k = 0; k < 2; ++k) {
        const int64_t slot = k * problem.slots + pass.slot_of(i);
        const int64_t column = k * problem.affine_size + problem.affine_of(i);
        const double size = std::abs(problem.dy[i]) * (k == 0 ? 1 : std::abs(xhat) + 3);
        slots[slot] += w * terms[k];
        slots_scale[slot] += std::abs(w) * size;
        affine[column] += terms[k];
        affine_scale[column] += size;
      }
    }
    if (!variant.centered) {
      slots.erase(slots.begin(), slots.begin() + problem.slots);
      slots_scale.erase(slots_scale.begin(), slots_scale.begin() + problem.slots);
    }

    const auto size = static_cast<int64_t>(slots.size());
    Buffer of_slots(size, Dtype::float64), of_affine(2 * problem.affine_size, Dtype::float64);
    Buffer dbias(problem.affine_size, Dtype::float32), dweight(problem.affine_size, variant.dtype);
    Buffer header(2, Dtype::float64);
    BackwardSums call;
    call.of = pass.of;
    call.of_slots = of_slots.doubles();
    const bool wants_sums = variant.one_in(5, 2), wants_gradients = variant.one_in(6, 2);
    if (wants_sums) call.of_affine = of_affine.doubles();
    if (wants_gradients) {
      call.dbias = dbias.mutable_values();
      call.dweight = dweight.mutable_values();
    }
    call.header.to = header.doubles();
    call.header.words = 2;
    call.header.values[1] = 5;
    const Device device(variant.multiprocessors,
                        backward_sums_workspace(call, variant.multiprocessors));
    ASSERT_EQ(launch(call, device.resources()), cudaSuccess);

    const double tolerance = sum_tolerance(variant.dtype);
    expect_near(of_slots.all(), slots, slots_scale, tolerance, "of_slots");
    if (wants_sums) expect_near(of_affine.all(), affine, affine_scale, tolerance, "of_affine");
    if (wants_gradients) {
      const auto half = affine.begin() + problem.affine_size;
      const auto half_scale = affine_scale.begin() + problem.affine_size;
      expect_near(dbias.all(), {affine.begin(), half}, {affine_scale.begin(), half_scale}, 2e-6,
                  "dbias");
      expect_near(dweight.all(), {half, affine.end()}, {half_scale, affine_scale.end()},
                  tolerance + pass_tolerance(variant.dtype), "dweight");
    }
    EXPECT_EQ(header.all(), (std::vector<double>{0, 5}));
  });
}

TEST(CudaBackwardSums, HaveTheSameBitsInAnyOrderOfBlocks) {
  for (const auto& shape : all_shapes()) {
    if (shape.elements() > 100000) continue;
    SCOPED_TRACE(::testing::Message() << shape);
    const Pass pass(shape, {9, Dtype::float16, 7});
    std::vector<std::vector<double>> results;
    for (const auto order : {cuda_emulation::Order::forward, cuda_emulation::Order::shuffled}) {
      cuda_emulation::set_order(order);
      Buffer of_slots(2 * pass.problem.slots, Dtype::float64);
      Buffer of_affine(2 * pass.problem.affine_size, Dtype::float64);
      BackwardSums call;
      call.of = pass.of;
      call.of_slots = of_slots.doubles();
      call.of_affine = of_affine.doubles();
      const Device device(7, backward_sums_workspace(call, 7));
      ASSERT_EQ(launch(call, device.resources()), cudaSuccess);
      results.push_back(of_slots.all());
      const auto affine = of_affine.all();
      results.back().insert(results.back().end(), affine.begin(), affine.end());
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

TEST(CudaBackwardApply, IsThatOfPlainLoops) {
  for_all(all_shapes(), [](const Shape& shape, const Variant& variant) {
    Pass pass(shape, variant);
    auto& problem = pass.problem;
    constexpr double count = 21;
    const auto totals =
        problem.random((variant.centered ? 2 : 1) * problem.slots, 0, 5, Dtype::float64);
    const auto more = problem.random(shape.elements());
    const bool adds = shape.by_column && variant.one_in(5, 2);
    const bool wants_residual = !shape.by_column && !variant.one_in(6, 3);
    const bool wants_dx = !wants_residual || !variant.one_in(7, 3);

    std::vector<double> dx, dresidual, scale;
    for (int64_t i = 0; i < shape.elements(); ++i) {
      const int64_t slot = pass.slot_of(i);
      const double share = problem.share_of(problem.cell_of(i)), rstd = pass.rstd(slot);
      const double g = pass.gradient(i), xhat = pass.xhat(i), w = pass.weight_at(i);
      const double first = variant.centered ? share * totals[slot] / count : 0;
      const double second = share * totals[(variant.centered ? problem.slots : 0) + slot] / count;
      dx.push_back(rstd * (g * w - first - xhat * second) + (adds ? more[i] : 0));
      dresidual.push_back(g);
      scale.push_back(rstd * (std::abs(problem.dy[i] * w) + std::abs(first) +
                              (std::abs(problem.x[i]) + 3) * rstd * std::abs(second)) +
                      std::abs(more[i]));
    }

    Buffer sums(totals, Dtype::float64), extra(more, variant.dtype, variant.offset(3));
    Buffer to_x(shape.elements(), variant.dtype, variant.offset(4));
    Buffer to_residual(shape.elements(), variant.dtype, variant.offset(5));
    Buffer words({2 * 9., 2 * 81.}, Dtype::float64);
    int32_t verdict = kPending;
    BackwardApply call;
    call.of = pass.of;
    call.sums = sums.doubles();
    call.count.all = count;
    if (adds) call.extra = extra.data();
    if (wants_dx) call.dx = to_x.data();
    if (wants_residual) call.dresidual = to_residual.data();
    call.check.verdict = &verdict;
    call.check.tags = words.doubles();
    call.check.tag = 9;
    call.check.ranks = 2;
    const Device device(variant.multiprocessors);
    ASSERT_EQ(launch(call, device.resources()), cudaSuccess);
    EXPECT_EQ(verdict, kFine);
    if (wants_dx) expect_near(to_x.all(), dx, scale, pass_tolerance(variant.dtype), "dx");
    if (wants_residual) {
      EXPECT_EQ(to_residual.all(), dresidual);
    }

    if (!variant.one_in(8, 3)) return;
    call.check.tag = 8;
    ASSERT_EQ(launch(call, device.resources()), cudaSuccess);
    EXPECT_EQ(verdict, kDisagreement);
    const std::vector<double> nothing(shape.elements(), std::nan(""));
    if (wants_dx) expect_near(to_x.all(), nothing, scale, 0, "dx");
    if (wants_residual) expect_near(to_residual.all(), nothing, scale, 0, "dresidual");
  });
}

// The gate lets through exactly what the forward let through, also where the output is near zero.
TEST(CudaBackwardApply, SeesTheSignThatTheForwardSaw) {
  for (const Shape shape : {Shape{2, 3, 700}, Shape{300, 8, 1}}) {
    Pass pass(shape, {5, Dtype::float32, 2});
    auto& problem = pass.problem;
    // Around the value that becomes zero.
    for (int64_t i = 0; i < shape.elements(); ++i) {
      const int64_t c = problem.cell_of(i);
      const double zero = pass.mean(c) - pass.bias[c] / pass.weight[c] / pass.rstd(c);
      problem.x[i] =
          rounded(zero * (1 + static_cast<double>(i % 41 - 20) * 0x1p-24), Dtype::float32);
    }
    Buffer x(problem.x, Dtype::float32), y(shape.elements(), Dtype::float32);
    Buffer dresidual(shape.elements(), Dtype::float32);
    const std::vector<double> none(2 * problem.slots);
    Buffer sums(none, Dtype::float64);
    const Device device(2);
    Apply forward;
    forward.layout = problem.layout();
    forward.x = x.data();
    forward.y = y.data();
    forward.weight = pass.weight.values();
    forward.bias = pass.bias.values();
    forward.relu = true;
    forward.statistics = pass.statistics.doubles();
    ASSERT_EQ(launch(forward, device.resources()), cudaSuccess);
    BackwardApply backward;
    backward.of = pass.of;
    backward.of.x = x.data();
    backward.of.gate = Gate::recompute;
    backward.of.weight = pass.weight.values();
    backward.of.bias = pass.bias.values();
    backward.sums = sums.doubles();
    backward.dresidual = dresidual.data();
    ASSERT_EQ(launch(backward, device.resources()), cudaSuccess);
    int64_t open = 0;
    for (int64_t i = 0; i < shape.elements(); ++i) {
      EXPECT_EQ(dresidual[i], y[i] > 0 ? problem.dy[i] : 0);
      open += y[i] > 0 ? 1 : 0;
    }
    EXPECT_GT(open, shape.elements() / 4);
    EXPECT_LT(open, shape.elements() * 3 / 4);
  }
}

// What is by cell only does not come by column, and the other way round.
TEST(CudaBackwardApply, AndAllOthersRefuseWhatDoesNotGoTogether) {
  const Device device(1);
  float value = 0;
  BackwardApply apply;
  apply.extra = &value;
  EXPECT_EQ(launch(apply, device.resources()), cudaErrorInvalidValue);
  apply.extra = nullptr;
  EXPECT_EQ(launch(apply, device.resources()), cudaSuccess);
  apply.of.layout.by_column = true;
  apply.dresidual = &value;
  EXPECT_EQ(launch(apply, device.resources()), cudaErrorInvalidValue);
  BackwardSums sums;
  sums.of.layout.by_column = true;
  sums.of.gate = Gate::recompute;
  EXPECT_EQ(launch(sums, device.resources()), cudaErrorInvalidValue);
  Apply forward;
  forward.layout.by_column = forward.relu = true;
  EXPECT_EQ(launch(forward, device.resources()), cudaErrorInvalidValue);
  const int64_t slot = 0;
  Moments moments;
  moments.layout.cells = moments.layout.slots = 1;
  moments.layout.slot_of_cell = &slot;  // without its inverse
  EXPECT_EQ(launch(moments, device.resources()), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace syncnorm::kernels::cuda::testing
