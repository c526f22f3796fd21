// Sums of values and squares.
#include <cuda_runtime.h>

#include <cmath>

#include "cuda_kernels/problem.h"

namespace syncnorm::kernels::cuda::testing {
namespace {

TEST(CudaMoments, AreThoseOfPlainLoops) {
  for_all(all_shapes(), [](const Shape& shape, const Variant& variant) {
    Problem problem(shape, variant);
    const bool adds = variant.one_in(1, 2);
    const bool centers = variant.centered && !variant.one_in(2, 4);
    auto center_from = problem.random(problem.slots, 2.5);
    if (problem.slots > 1) center_from[1] = std::nan("");
    const auto residual = problem.random(shape.elements());

    std::vector<double> value(problem.x), want(2 * problem.slots), scale(2 * problem.slots);
    for (int64_t i = 0; i < shape.elements(); ++i) {
      if (adds) value[i] = rounded(problem.x[i] + residual[i], variant.dtype);
      const int64_t slot = problem.slot_of(problem.cell_of(i));
      const double share = problem.share_of(problem.cell_of(i));
      const double c = centers && std::isfinite(center_from[slot]) ? center_from[slot] : 0;
      const double d = value[i] - c;
      want[slot] += share * d;
      want[problem.slots + slot] += share * d * d;
      scale[slot] += std::abs(d);
      scale[problem.slots + slot] += d * d;
    }

    Buffer x(problem.x, variant.dtype, variant.offset(0));
    Buffer term(residual, variant.dtype, variant.offset(1));
    Buffer sum(shape.elements(), variant.dtype, variant.offset(2));
    Buffer from(center_from, variant.dtype);
    Buffer center(problem.slots, Dtype::float64);
    Buffer sums(variant.centered ? 2 * problem.slots : problem.slots, Dtype::float64);
    Buffer header(6, Dtype::float64), hash(2, Dtype::float64);
    Moments call;
    call.layout = problem.layout();
    call.dtype = variant.dtype;
    call.x = x.data();
    if (adds) {
      call.residual = term.data();
      call.sum = sum.data();
    }
    if (centers) {
      call.center_from = from.values();
      call.center = center.doubles();
    }
    call.sums = sums.doubles();
    call.header.to = header.doubles();
    call.header.words = 5;
    for (int w = 0; w < 5; ++w) call.header.values[w] = w + 1;
    if (centers) call.header.center_hash = hash.doubles();
    const Device device(variant.multiprocessors, moments_workspace(call, variant.multiprocessors));
    ASSERT_EQ(launch(call, device.resources()), cudaSuccess);

    if (!variant.centered) {
      want.erase(want.begin(), want.begin() + problem.slots);
      scale.erase(scale.begin(), scale.begin() + problem.slots);
    }
    expect_near(sums.all(), want, scale, sum_tolerance(variant.dtype), "sums");
    if (adds) {
      EXPECT_EQ(sum.all(), value);
    }
    for (int w = 0; w < 5; ++w) EXPECT_EQ(header[w], w + 1);
    EXPECT_TRUE(std::isnan(header[5]));
    if (!centers) return;
    for (int64_t s = 0; s < problem.slots; ++s)
      EXPECT_EQ(center[s], std::isfinite(center_from[s]) ? center_from[s] : 0);
    EXPECT_EQ(hash[1], hash[0] * hash[0]);
    EXPECT_GE(hash[0], 0);
    EXPECT_LT(hash[0], 0x1p16);
  });
}

/// Sums of one input with given settings.
std::vector<double> sums_of(const Problem& problem, const std::vector<double>& values,
                            const std::vector<double>& center = {}) {
  const auto& variant = problem.variant;
  Buffer x(values, variant.dtype);
  Buffer from(center, Dtype::float64), written(problem.slots, Dtype::float64);
  Buffer sums(problem.layout().sums() * problem.slots, Dtype::float64);
  Moments call;
  call.layout = problem.layout();
  call.dtype = variant.dtype;
  call.x = x.data();
  call.sums = sums.doubles();
  if (!center.empty()) {
    call.center_from = from.values();
    call.center = written.doubles();
  }
  const Device device(variant.multiprocessors, moments_workspace(call, variant.multiprocessors));
  EXPECT_EQ(launch(call, device.resources()), cudaSuccess);
  return sums.all();
}

// More tiles than are merged at once, in both the tiles' and the groups' stage; idle lanes.
TEST(CudaMoments, MergeManyTilesOfColumns) {
  const Shape shape{8500, 100, 1};
  Problem problem(shape, {1, Dtype::float32, 132});
  std::vector<double> want(200), scale(200);
  for (int64_t i = 0; i < shape.elements(); ++i) {
    want[i % 100] += problem.x[i];
    want[100 + i % 100] += problem.x[i] * problem.x[i];
    scale[i % 100] += std::abs(problem.x[i]);
    scale[100 + i % 100] += problem.x[i] * problem.x[i];
  }
  std::vector<std::vector<double>> results;
  for (const auto order : {cuda_emulation::Order::forward, cuda_emulation::Order::backward,
                           cuda_emulation::Order::shuffled}) {
    cuda_emulation::set_order(order);
    results.push_back(sums_of(problem, problem.x));
    expect_near(results.back(), want, scale, 1e-7, "sums");
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(CudaMoments, HaveTheSameBitsInAnyOrderOfBlocks) {
  for (const auto& shape : all_shapes())
    for (const int multiprocessors : {1, 7}) {
      if (shape.elements() > 50000) continue;
      SCOPED_TRACE(::testing::Message() << shape);
      Problem problem(shape, {1, Dtype::float32, multiprocessors});
      cuda_emulation::set_order(cuda_emulation::Order::forward);
      const auto first = sums_of(problem, problem.x);
      for (const auto order : {cuda_emulation::Order::backward, cuda_emulation::Order::shuffled}) {
        cuda_emulation::set_order(order);
        EXPECT_EQ(sums_of(problem, problem.x), first);
      }
    }
}

// With the digits of float, however far from zero the values are and wherever the center is.
TEST(CudaMoments, KeepDigitsWhereTheMeanIsLarge) {
  for (const Shape shape : {Shape{2, 1, 50000}, Shape{5000, 4, 1}, Shape{1, 3, 9000, 1, true}})
    for (const double center : {0., 900., 1024.}) {
      SCOPED_TRACE(::testing::Message() << shape << " about " << center);
      Problem problem(shape, {2, Dtype::float32, 7});
      const auto values = problem.random(shape.elements(), 1024, 0.01);
      const auto sums =
          sums_of(problem, values, std::vector<double>(static_cast<size_t>(problem.slots), center));
      for (int64_t s = 0; s < problem.slots; ++s) {
        double n = 0, mean = 0, squares = 0;
        for (int64_t i = 0; i < shape.elements(); ++i)
          if (problem.cell_of(i) == s) n += 1, mean += values[i];
        mean /= n;
        for (int64_t i = 0; i < shape.elements(); ++i)
          if (problem.cell_of(i) == s) squares += (values[i] - mean) * (values[i] - mean);
        const double offset = sums[s] / n;
        EXPECT_NEAR(center + offset, mean, 1e-9);
        const double variance = sums[problem.slots + s] / n - offset * offset;
        EXPECT_NEAR(variance / (squares / n), 1, 3e-6);
      }
    }
}

// Squares beyond the range of float, on either side, infinity, NaN, and constants.
TEST(CudaMoments, ReachBeyondTheRangeOfFloat) {
  for (const Shape shape :
       {Shape{2, 1, 700}, Shape{300, 8, 1}, Shape{300, 3, 1}, Shape{1, 40, 64, 1, true}})
    for (const bool centered : {true, false})
      for (const double size : {1e-30, 1e30}) {
        SCOPED_TRACE(::testing::Message() << shape << " of size " << size);
        Variant variant{3, Dtype::float32, 2};
        variant.centered = centered;
        Problem problem(shape, variant);
        const auto values = problem.random(shape.elements(), 0, size);
        std::vector<double> want(problem.slots);
        for (int64_t i = 0; i < shape.elements(); ++i)
          want[problem.cell_of(i)] += values[i] * values[i];
        auto sums = sums_of(problem, values);
        if (centered) sums.erase(sums.begin(), sums.begin() + problem.slots);
        expect_near(sums, want, want, 1e-6, "squares");
      }
  Problem problem({50, 4, 1}, {3, Dtype::float32, 2});
  for (int64_t i = 0; i < 200; ++i) problem.x[i] = i % 4;
  problem.x[4 * 7 + 1] = std::nan("");
  problem.x[4 * 40 + 2] = INFINITY;
  const auto sums = sums_of(problem, problem.x);
  EXPECT_EQ(sums[0], 0);
  EXPECT_EQ(sums[4], 0);
  EXPECT_TRUE(std::isnan(sums[1]) && std::isnan(sums[5]));
  EXPECT_TRUE(std::isinf(sums[2]) && std::isinf(sums[6]));
  EXPECT_EQ(sums[3], 150);
  EXPECT_EQ(sums[7], 450);
}

TEST(CudaMoments, HashTellsCentersApart) {
  const auto hash_of = [](const std::vector<double>& centers) {
    const auto n = static_cast<int64_t>(centers.size());
    Buffer from(centers, Dtype::float64), center(n, Dtype::float64), sums(2 * n, Dtype::float64);
    Buffer hash(2, Dtype::float64);
    Moments call;
    call.layout.cells = call.layout.slots = n;
    call.layout.inner = 4;
    call.center_from = from.values();
    call.center = center.doubles();
    call.sums = sums.doubles();
    call.header.center_hash = hash.doubles();
    const Device device(2, moments_workspace(call, 2));
    EXPECT_EQ(launch(call, device.resources()), cudaSuccess);
    return hash[0];
  };
  const double hash = hash_of({1, 2, 0});
  EXPECT_EQ(hash, hash_of({1, 2, -0.}));
  EXPECT_NE(hash, hash_of({2, 1, 0}));
  EXPECT_NE(hash, hash_of({1, 2, 1e-300}));
  EXPECT_NE(hash, hash_of({1, 2}));
  EXPECT_EQ(hash_of(std::vector<double>(1000, 3)), hash_of(std::vector<double>(1000, 3)));
}

TEST(CudaMoments, RefuseWhatCannotBe) {
  const Device device(1);
  Moments call;
  call.layout.outer = call.layout.cells = call.layout.inner = int64_t{1} << 31;
  EXPECT_EQ(launch(call, device.resources()), cudaErrorInvalidValue);
  call.layout.outer = -1;
  EXPECT_EQ(launch(call, device.resources()), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace syncnorm::kernels::cuda::testing
