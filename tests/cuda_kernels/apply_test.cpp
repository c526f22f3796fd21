// Statistics, running statistics, verdicts, and the output.
#include <cuda_runtime.h>

#include <cmath>

#include "cuda_kernels/problem.h"

namespace syncnorm::kernels::cuda::testing {
namespace {

double& at(std::vector<double>& statistics, int row, int64_t slot) {
  return statistics[row * (statistics.size() / 3) + slot];
}

/// The statistics that `sums` about `center` come to.
std::vector<double> statistics_of(const std::vector<double>& sums,
                                  const std::vector<double>& center, double count, double eps,
                                  bool centered) {
  const auto slots = static_cast<int64_t>(center.size());
  std::vector<double> statistics(3 * slots);
  for (int64_t s = 0; s < slots; ++s) {
    const double offset = centered ? sums[s] / count : 0;
    const double square = sums[(centered ? slots : 0) + s] / count;
    at(statistics, 0, s) = centered ? center[s] + offset : 0;
    at(statistics, 1, s) = centered ? std::max(square - offset * offset, 0.) : square;
    at(statistics, 2, s) = 1 / std::sqrt(at(statistics, 1, s) + eps);
  }
  return statistics;
}

/// Sums of `count` values whose mean is near 3 and whose variance is near 1, about `center`.
std::vector<double> likely_sums(Problem& problem, const std::vector<double>& center, double count) {
  std::vector<double> sums;
  const auto means = problem.random(problem.slots, 3, 0.1, Dtype::float64);
  if (problem.variant.centered)
    for (int64_t s = 0; s < problem.slots; ++s) sums.push_back(count * (means[s] - center[s]));
  for (int64_t s = 0; s < problem.slots; ++s) {
    const double offset = problem.variant.centered ? means[s] - center[s] : means[s];
    sums.push_back(count * (offset * offset + 1 + 0.01 * static_cast<double>(s % 7)));
  }
  return sums;
}

TEST(CudaApply, IsThatOfPlainLoops) {
  for_all(all_shapes(), [](const Shape& shape, const Variant& variant) {
    Problem problem(shape, variant);
    const bool weighted = !variant.one_in(1, 4), biased = weighted && !variant.one_in(2, 4);
    const bool adds = !shape.by_column && variant.one_in(3, 2);
    const bool rectifies = !shape.by_column && variant.one_in(4, 2);
    const auto parameters = variant.one_in(5, 2) ? Dtype::float32 : variant.dtype;
    constexpr double count = 37, eps = 1e-5;
    const auto center = problem.random(problem.slots, 2.9, 0.1, Dtype::float64);
    const auto local = likely_sums(problem, center, count);
    const auto want_statistics = statistics_of(local, center, count, eps, variant.centered);
    const auto residual = problem.random(shape.elements());

    Buffer x(problem.x, variant.dtype, variant.offset(0));
    Buffer term(residual, variant.dtype, variant.offset(1));
    Buffer y(shape.elements(), variant.dtype, variant.offset(2));
    Buffer weight(problem.weight, parameters), bias(problem.bias, parameters);
    Buffer sums(local, Dtype::float64), about(center, Dtype::float64);
    Buffer statistics(3 * problem.slots, Dtype::float64);
    Apply call;
    call.layout = problem.layout();
    call.dtype = variant.dtype;
    call.x = x.data();
    call.y = y.data();
    if (adds) call.residual = term.data();
    if (weighted) call.weight = weight.values();
    if (biased) call.bias = bias.values();
    call.relu = rectifies;
    call.statistics = statistics.doubles();
    call.finish.sums = sums.doubles();
    call.finish.center = about.doubles();
    call.finish.count.all = count;
    call.finish.eps = eps;
    const Device device(variant.multiprocessors);
    ASSERT_EQ(launch(call, device.resources()), cudaSuccess);
    std::vector<double> scale;
    for (const double value : want_statistics) scale.push_back(std::abs(value) + 1);
    expect_near(statistics.all(), want_statistics, scale, 1e-13, "statistics");

    std::vector<double> want, size;
    for (int64_t i = 0; i < shape.elements(); ++i) {
      const int64_t slot = problem.slot_of(problem.cell_of(i));
      const double mean = want_statistics[slot], rstd = want_statistics[2 * problem.slots + slot];
      const double w = weighted ? weight[problem.affine_of(i)] : 1;
      const double b = biased ? bias[problem.affine_of(i)] : 0;
      double value = (problem.x[i] - mean) * rstd * w + b + (adds ? residual[i] : 0);
      size.push_back((std::abs(problem.x[i]) + std::abs(mean)) * rstd * std::abs(w) + std::abs(b) +
                     std::abs(residual[i]) + 1);
      if (rectifies) value = std::max(value, 0.);
      want.push_back(value);
    }
    expect_near(y.all(), want, size, pass_tolerance(variant.dtype), "y");

    // The same with the statistics as they are now, and without anything else to do.
    Buffer again(shape.elements(), variant.dtype, variant.offset(2));
    call.y = again.data();
    call.finish = {};
    ASSERT_EQ(launch(call, device.resources()), cudaSuccess);
    EXPECT_EQ(again.all(), y.all());
  });
}

/// A batch norm of 300 channels whose sums are given, with running statistics and a check that
/// finds nothing.
class CudaFinish : public ::testing::Test {
 protected:
  static constexpr int64_t kSlots = 300;
  static constexpr double kCount = 64;

  CudaFinish() {
    call.layout.outer = 2;
    call.layout.cells = call.layout.slots = call.layout.affine_rows = kSlots;
    call.layout.inner = 3;
    call.dtype = Dtype::bfloat16;
    call.x = x.data();
    call.y = y.data();
    call.statistics = statistics.doubles();
    auto& finish = call.finish;
    finish.sums = sums.doubles();
    finish.center = center.doubles();
    finish.count.total = total.doubles();
    finish.count.slots_of_total = 2;
    finish.eps = 1e-3;
    finish.floor = 1e-3;
    finish.ratio = 0x1p10;
    finish.running_mean = mean.mutable_values();
    finish.running_var = variance.mutable_values();
    finish.momentum = 0.25;
    finish.batches = &batches;
    finish.check.verdict = &verdict;
    finish.check.tags = words.doubles();
    finish.check.tag = 60000;
    finish.check.ranks = 3;
    finish.check.center_hash = words.doubles() + 2;
    finish.check.total_values = 2 * kCount;
    finish.check.refuses_single_value = true;
  }

  Verdict run() {
    verdict = kPending;
    EXPECT_EQ(launch(call, device.resources()), cudaSuccess);
    return static_cast<Verdict>(verdict);
  }
  void expect_refused(Verdict why) {
    const auto before = mean.all();
    EXPECT_EQ(run(), why);
    EXPECT_EQ(mean.all(), before);
    EXPECT_EQ(batches, 7);
    for (const double value : y.all()) EXPECT_TRUE(std::isnan(value));
    for (const double value : statistics.all()) EXPECT_TRUE(std::isnan(value));
  }

  Problem problem{{2, kSlots, 3}, {4, Dtype::bfloat16, 1}};
  std::vector<double> about = problem.random(kSlots, 3, 0.1, Dtype::float64);
  std::vector<double> local = likely_sums(problem, about, kCount);
  Buffer x{problem.x, Dtype::bfloat16}, y{2 * kSlots * 3, Dtype::bfloat16};
  Buffer sums{local, Dtype::float64}, center{about, Dtype::float64};
  Buffer statistics{3 * kSlots, Dtype::float64};
  Buffer total{{2 * kCount}, Dtype::float64};
  Buffer words{{3 * 60000., 3 * 60000. * 60000, 3 * 500., 3 * 500. * 500}, Dtype::float64};
  Buffer mean{std::vector<double>(kSlots, 1), Dtype::float32};
  Buffer variance{std::vector<double>(kSlots, 2), Dtype::float16};
  int64_t batches = 7;
  int32_t verdict = kPending;
  Device device{2};
  Apply call;
};

TEST_F(CudaFinish, UpdatesRunningStatistics) {
  auto want = statistics_of(local, about, kCount, 1e-3, true);
  EXPECT_EQ(run(), kFine);
  EXPECT_EQ(batches, 8);
  for (int64_t s = 0; s < kSlots; ++s) {
    EXPECT_NEAR(mean[s], 0.75 + 0.25 * at(want, 0, s), 1e-6);
    EXPECT_NEAR(variance[s], 1.5 + 0.25 * at(want, 1, s) * kCount / (kCount - 1), 2e-3);
  }
  // Cumulative: the ninth batch counts as much as each of the eight before.
  const auto before = mean.all();
  call.finish.momentum = -1;
  call.y = nullptr;
  EXPECT_EQ(run(), kFine);
  EXPECT_EQ(batches, 9);
  for (int64_t s = 0; s < kSlots; ++s)
    EXPECT_NEAR(mean[s], before[s] + (at(want, 0, s) - before[s]) / 9, 1e-6);
}

TEST_F(CudaFinish, LeavesThemWhereThereIsNothingToEstimate) {
  for (const double count : {0., 1.}) {
    Buffer few({count}, Dtype::float64);
    call.finish.count.total = few.doubles();
    call.finish.count.slots_of_total = 1;
    call.finish.check.total_values = 0;
    call.finish.check.refuses_single_value = false;
    call.finish.ratio = INFINITY;
    EXPECT_EQ(run(), kFine);
    EXPECT_EQ(batches, 7);
    for (int64_t s = 0; s < kSlots; ++s) {
      EXPECT_EQ(mean[s], 1);
      EXPECT_EQ(variance[s], 2);
    }
  }
}

TEST_F(CudaFinish, SeesWhereTagsDiffer) {
  for (const std::vector<double>& differing :
       {std::vector<double>{3 * 60000. + 1, 3 * 60000. * 60000},
        {3 * 60000., 3 * 60000. * 60000 + 1},
        {std::nan(""), 3 * 60000. * 60000},
        {3 * 60000., std::nan("")}}) {
    Buffer tags(differing, Dtype::float64);
    call.finish.check.tags = tags.doubles();
    expect_refused(kDisagreement);
  }
}

TEST_F(CudaFinish, SeesWhereCentersDiffer) {
  Buffer hashes({500 + 500 + 501, 500. * 500 * 2 + 501. * 501}, Dtype::float64);
  call.finish.check.center_hash = hashes.doubles();
  expect_refused(kCentersDiffer);
}

TEST_F(CudaFinish, SeesWhereShardsDoNotFit) {
  call.finish.check.total_values = 2 * kCount + 1;
  expect_refused(kShardsDoNotFit);
}

TEST_F(CudaFinish, RefusesSingleValues) {
  Buffer one({2.}, Dtype::float64);
  call.finish.count.total = one.doubles();
  call.finish.check.total_values = 0;
  expect_refused(kSingleValue);
}

TEST_F(CudaFinish, SaysWhereDigitsWereLost) {
  local[kSlots - 1] = kCount * 100;  // its variance is cut to zero
  Buffer lost(local, Dtype::float64);
  call.finish.sums = lost.doubles();
  EXPECT_EQ(run(), kLostDigits);
  EXPECT_EQ(batches, 8);
  EXPECT_FALSE(std::isnan(y[0]));
  // The flag does not stay for the next call.
  call.finish.sums = sums.doubles();
  EXPECT_EQ(run(), kFine);
}

TEST_F(CudaFinish, CountsEachSlotByItself) {
  std::vector<double> counts(kSlots, kCount);
  counts[5] = 2 * kCount;
  counts[6] = 0;
  Buffer each(counts, Dtype::float64);
  call.finish.count = {};
  call.finish.count.each = each.doubles();
  call.finish.check.total_values = 0;
  EXPECT_EQ(run(), kLostDigits);
  EXPECT_NEAR(statistics[5], about[5] + local[5] / (2 * kCount), 1e-12);
  EXPECT_NEAR(statistics[6], about[6] + local[6], 1e-12);
  EXPECT_EQ(mean[6], 1);
  EXPECT_NE(mean[5], 1);
}

TEST_F(CudaFinish, IsTakenPartInByEmptyInputs) {
  for (int64_t* size : {&call.layout.outer, &call.layout.inner}) {
    const int64_t before = std::exchange(*size, 0);
    call.x = call.y = nullptr;
    statistics.all();
    EXPECT_EQ(run(), kFine);
    auto want = statistics_of(local, about, kCount, 1e-3, true);
    expect_near(statistics.all(), want, std::vector<double>(want.size(), 10), 1e-13, "statistics");
    *size = before;
  }
  EXPECT_EQ(batches, 9);
}

TEST_F(CudaFinish, HasTheSameBitsInAnyOrder) {
  std::vector<std::vector<double>> results;
  for (const auto order : {cuda_emulation::Order::forward, cuda_emulation::Order::backward,
                           cuda_emulation::Order::shuffled}) {
    cuda_emulation::set_order(order);
    EXPECT_EQ(run(), kFine);
    results.push_back(y.all());
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

}  // namespace
}  // namespace syncnorm::kernels::cuda::testing
