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

std::string describe(const MomentsRequest& request, const NormLayout& layout,
                     const at::Tensor& center) {
  Signature signature;
  signature.add("pass", "forward")
      .add(layout.unit, layout.slots)
      .add("dtype", c10::toString(request.dtype))
      .add("eps", request.eps)
      .add("gradient mode", request.grad_mode ? "on" : "off");
  if (center.defined()) signature.add("running_mean (hash)", hash_of(center));
  return signature.append(request.details).text();
}

/// Relative error of the variance is about (mean - center)^2 / variance times double's 2^-53;
/// beyond these ratios it would show in the input's dtype. It shows beside eps only, unless the
/// variance itself is kept for running_var, where it matters down to kNoise * eps.
constexpr double kNoise = 0x1p-30;
double tolerable_ratio(at::ScalarType dtype) { return dtype == at::kDouble ? 0x1p10 : 0x1p27; }

/// [2 or 1, slots]: this rank's sums about `center`, the first left out where it is not needed.
at::Tensor local_sums(const NormInput& input, const NormLayout& layout, const at::Tensor& center) {
  auto sums = kernels::kernels_for(input.data.device())
                  .moments(input.data, input.layout, layout.to_cells(center));
  if (layout.share.defined()) sums = sums * layout.share;
  return layout.to_slots(layout.centered ? sums : sums.narrow(0, 1, 1));
}

Moments exchange_about(const NormInput& input, const NormLayout& layout, const at::Tensor& center,
                       const std::string& details, const MomentsRequest& request,
                       bool* lost_digits) {
  const auto sums = local_sums(input, layout, center);
  StatisticsBuffer buffer(request.comm, kHeaderWords + sums.numel(), sums.device());
  const auto words = buffer.words();
  const auto header = at::tensor(
      {static_cast<double>(layout.values), request.wants_gradient ? 1.0 : 0.0}, at::kDouble);
  words.narrow(0, 0, kHeaderWords).copy_(header);
  words.narrow(0, kHeaderWords, sums.numel()).copy_(sums.view({-1}));
  buffer.exchange(details);

  const auto totals = words.narrow(0, 0, kHeaderWords).cpu();
  const auto values = static_cast<int64_t>(totals[kCount].item<double>());
  TORCH_CHECK_VALUE(layout.total_values.value_or(values) == values, ModuleScope::current(),
                    ": the ranks' shards add up to ", values, ", not to ", *layout.total_values);
  Moments result;
  result.count =
      layout.count.defined()
          ? layout.count
          : (totals[kCount] / static_cast<double>(layout.slots_of_values)).to(sums.device());
  result.ranks_wanting_gradient = static_cast<int64_t>(totals[kWanting].item<double>());
  const auto means =
      words.narrow(0, kHeaderWords, sums.numel()).view(sums.sizes()) / result.count.clamp_min(1);
  if (!layout.centered) {
    result.mean = center;
    result.variance = means[0];
    return result;
  }
  const auto offset = means[0];
  const auto offset_squared = offset * offset;
  result.mean = center + offset;
  // NaN stays NaN; only the rounding of a difference below zero is cut. Where there are no values
  // there is nothing to normalise, and sums of nothing must stay zero, not NaN.
  result.variance =
      at::where(result.count > 0, (means[1] - offset_squared).clamp_min(0), at::ones_like(offset));
  const double floor = request.keeps_variance ? kNoise * request.eps : request.eps;
  *lost_digits = (offset_squared > tolerable_ratio(request.dtype) * (result.variance + floor))
                     .any()
                     .item<bool>();
  return result;
}

}  // namespace

Moments exchange_moments(const NormInput& input, const NormLayout& layout, const at::Tensor& center,
                         const MomentsRequest& request) {
  bool lost_digits = false;
  const auto first = center.defined()
                         ? center
                         : at::zeros({layout.slots}, input.data.options().dtype(at::kDouble));
  auto moments = exchange_about(input, layout, first, describe(request, layout, center), request,
                                &lost_digits);
  if (!lost_digits) return moments;
  request.comm->count_second_exchange();
  const auto nearer = at::where(moments.mean.isfinite(), moments.mean, first);
  return exchange_about(input, layout, nearer, describe(request, layout, nearer), request,
                        &lost_digits);
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
