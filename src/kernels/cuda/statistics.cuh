#pragma once

#include "kernels/cuda/device.cuh"

/// From sums to statistics, and from statistics to the coefficients of the passes.
namespace syncnorm::kernels::cuda {

/// (x - center)*scale + offset: one expression for forward and backward, so that both see the same
/// sign. center is the part of the mean that the dtype holds, so that subtracting it costs x no
/// digits; the rest of the mean is in offset.
template <typename A>
struct Affine {
  A center, scale, offset;
  __device__ A operator()(A x) const { return fused(x - center, scale, offset); }
};

/// xhat*weight + bias, as a function of x.
template <typename A>
__device__ inline Affine<A> affine_of(double mean, double rstd, double weight, double bias) {
  const A center = static_cast<A>(mean);
  const double shift = (static_cast<double>(center) - mean) * rstd;
  return {center, static_cast<A>(rstd * weight), static_cast<A>(shift * weight + bias)};
}

__device__ inline double count_of(const Count& count, int64_t slot) {
  if (count.each != nullptr) return count.each[slot];
  return count.total == nullptr ? count.all : *count.total / count.slots_of_total;
}
/// Sums of nothing must stay zero, not NaN.
__device__ inline double divisor_of(const Count& count, int64_t slot) {
  return fmax(count_of(count, slot), 1.);
}

struct Statistics {
  double mean, variance, rstd;
  bool lost_digits;
};

/// Of the ranks' sums, or as they were written.
__device__ inline Statistics statistics_of(const Apply& call, int64_t slot) {
  const auto& finish = call.finish;
  const int64_t slots = call.layout.slots;
  if (finish.sums == nullptr)
    return {call.statistics[slot], call.statistics[slots + slot], call.statistics[2 * slots + slot],
            false};
  Statistics of = {};
  const double count = divisor_of(finish.count, slot);
  const double square_mean = finish.sums[(call.layout.sums() - 1) * slots + slot] / count;
  if (call.layout.centered) {
    const double offset = finish.sums[slot] / count, square = offset * offset;
    const double left = square_mean - square;
    of.mean = finish.center == nullptr ? offset : finish.center[slot] + offset;
    of.variance = left < 0 ? 0 : left;  // NaN stays NaN; only rounding below zero is cut
    of.lost_digits = square > finish.ratio * (of.variance + finish.floor);
  } else {
    of.variance = square_mean;
  }
  of.rstd = 1 / sqrt(of.variance + finish.eps);
  return of;
}

/// What can be said before any slot is looked at.
__device__ inline Verdict verdict_of(const Check& check, const Count& count) {
  if (check.verdict == nullptr) return kFine;
  const double tags = check.ranks * check.tag;
  if (check.tags != nullptr && !(check.tags[0] == tags && check.tags[1] == tags * check.tag))
    return kDisagreement;
  const double* hash = check.center_hash;
  if (hash != nullptr && !(check.ranks * hash[1] == hash[0] * hash[0])) return kCentersDiffer;
  if (check.total_values != 0 && count.total != nullptr && *count.total != check.total_values)
    return kShardsDoNotFit;
  if (check.refuses_single_value && count.each == nullptr && count_of(count, 0) == 1)
    return kSingleValue;
  return kFine;
}

/// By one thread: the host may see it at once.
__device__ inline void write_verdict(const Check& check, Verdict verdict) {
  if (check.verdict == nullptr) return;
  __threadfence_system();
  *const_cast<volatile int32_t*>(check.verdict) = verdict;
}

}  // namespace syncnorm::kernels::cuda
