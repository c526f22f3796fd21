#include "autograd/moments.h"

#include <algorithm>
#include <cstring>

#include "comm/signature.h"
#include "comm/statistics_buffer.h"

namespace syncnorm {
namespace {

enum HeaderWord : int64_t { kCount, kWanting, kHeaderWords };

/// Differing centers would make the sums meaningless, so they are part of what must agree.
uint64_t hash_of(const at::Tensor& values) {
  const auto host = values.cpu().contiguous();
  const auto* data = host.const_data_ptr<double>();
  uint64_t hash = 0x9e3779b97f4a7c15u;
  for (int64_t i = 0; i < host.numel(); ++i) {
    uint64_t bits = 0;
    const double value = data[i] == 0 ? 0.0 : data[i];  // one zero, whatever its sign
    std::memcpy(&bits, &value, sizeof bits);
    hash = (hash ^ bits) * 0x2545f4914f6cdd1du;
    hash ^= hash >> 29;
  }
  return hash;
}

std::string describe(const MomentsRequest& request, const kernels::SlotLayout& layout,
                     const at::Tensor& center) {
  return Signature()
      .add("pass", "forward")
      .add("channels", layout.slots)
      .add("dtype", c10::toString(request.dtype))
      .add("eps", request.eps)
      .add("gradient mode", request.grad_mode ? "on" : "off")
      .add("running_mean (hash)", hash_of(center))
      .text();
}

/// Relative error of the variance is about (mean - center)^2 / variance times double's 2^-53;
/// beyond these ratios it would show in the input's dtype. A variance far below eps matters to
/// running_var alone, and below kNoise * eps to nothing.
constexpr double kNoise = 0x1p-30;
double tolerable_ratio(at::ScalarType dtype) { return dtype == at::kDouble ? 0x1p10 : 0x1p27; }

Moments exchange_about(const at::Tensor& x, const kernels::SlotLayout& layout,
                       const at::Tensor& center, const MomentsRequest& request, bool* lost_digits) {
  const int64_t slots = layout.slots;
  StatisticsBuffer buffer(request.comm, kHeaderWords + 2 * slots, x.device());
  const auto words = buffer.words();
  const auto header = at::tensor(
      {static_cast<double>(layout.outer * layout.inner), request.wants_gradient ? 1.0 : 0.0},
      at::kDouble);
  words.narrow(0, 0, kHeaderWords).copy_(header);
  words.narrow(0, kHeaderWords, 2 * slots)
      .copy_(kernels::kernels_for(x.device()).moments(x, layout, center).view({2 * slots}));
  buffer.exchange(describe(request, layout, center));

  const auto totals = words.narrow(0, 0, kHeaderWords).cpu();
  Moments result;
  result.count = totals[kCount].item<double>();
  result.ranks_wanting_gradient = static_cast<int64_t>(totals[kWanting].item<double>());
  const double divisor = std::max(result.count, 1.0);
  const auto offset = words.narrow(0, kHeaderWords, slots) / divisor;
  const auto offset_squared = offset * offset;
  result.mean = center + offset;
  // NaN stays NaN; only the rounding of a difference below zero is cut.
  result.variance =
      (words.narrow(0, kHeaderWords + slots, slots) / divisor - offset_squared).clamp_min(0);
  if (result.count == 0)
    result.variance.fill_(1);  // nothing to normalise, and sums of nothing must stay zero, not NaN
  *lost_digits = result.count > 0 && (offset_squared > tolerable_ratio(request.dtype) *
                                                           (result.variance + kNoise * request.eps))
                                         .any()
                                         .item<bool>();
  return result;
}

}  // namespace

Moments exchange_moments(const at::Tensor& x, const kernels::SlotLayout& layout,
                         const at::Tensor& center, const MomentsRequest& request) {
  bool lost_digits = false;
  auto moments = exchange_about(x, layout, center, request, &lost_digits);
  if (!lost_digits) return moments;
  request.comm->count_second_exchange();
  const auto nearer = at::where(moments.mean.isfinite(), moments.mean, center);
  return exchange_about(x, layout, nearer, request, &lost_digits);
}

at::Tensor exchange_sums(const at::Tensor& local, const std::shared_ptr<Communicator>& comm,
                         const char* pass) {
  StatisticsBuffer buffer(comm, local.numel(), local.device());
  const auto words = buffer.words();
  words.copy_(local.reshape({-1}));
  buffer.exchange(Signature().add("pass", pass).add("words", local.numel()).text());
  return words.view(local.sizes());
}

}  // namespace syncnorm
