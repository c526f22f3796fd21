#include <ATen/Dispatch.h>

#include <cmath>

#include "kernels/cpu/coefficients.h"
#include "kernels/cpu/passes.h"

namespace syncnorm::kernels {
namespace {

/// `factor`: of the latest value.
void blend(const at::Tensor& running, const double* latest, double factor, double momentum) {
  const auto dense = running.contiguous();
  const int64_t n = dense.numel();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, dense.scalar_type(), "update_running", [&] {
        auto* values = dense.data_ptr<scalar_t>();
        for (int64_t i = 0; i < n; ++i)
          values[i] = static_cast<scalar_t>(static_cast<double>(values[i]) * (1 - momentum) +
                                            latest[i] * factor * momentum);
      });
  if (!dense.is_same(running)) running.copy_(dense);
}

}  // namespace

at::Tensor finite_center(const at::Tensor& running_mean) {
  const auto dense = running_mean.contiguous();
  auto center = at::empty(dense.sizes(), at::kDouble);
  auto* to = center.data_ptr<double>();
  const int64_t n = dense.numel();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dense.scalar_type(), "finite_center",
                                  [&] {
                                    const auto* from = dense.const_data_ptr<scalar_t>();
                                    for (int64_t i = 0; i < n; ++i) {
                                      const auto value = static_cast<double>(from[i]);
                                      to[i] = std::isfinite(value) ? value : 0;
                                    }
                                  });
  return center;
}

bool finish_statistics(const at::Tensor& sums, const NormLayout& layout, const at::Tensor& center,
                       const SlotCount& count, const Precision& precision,
                       const at::Tensor& statistics) {
  const int64_t slots = layout.slots;
  const auto* first = sums.const_data_ptr<double>();
  const auto* second = first + (layout.sums() - 1) * slots;
  const auto* about = center.defined() ? center.const_data_ptr<double>() : nullptr;
  auto* mean = statistics.data_ptr<double>();
  auto* variance = mean + kVariance * slots;
  auto* rstd = mean + kRstd * slots;
  const Counts counts(count);
  bool lost_digits = false;
  for (int64_t s = 0; s < slots; ++s) {
    const double square_mean = second[s] / counts[s];
    if (layout.centered) {
      const double offset = first[s] / counts[s];
      const double left = square_mean - offset * offset;
      mean[s] = about == nullptr ? offset : about[s] + offset;
      variance[s] = left < 0 ? 0 : left;  // NaN stays NaN; only rounding below zero is cut
      lost_digits |= offset * offset > precision.ratio * (variance[s] + precision.floor);
    } else {
      mean[s] = 0;
      variance[s] = square_mean;
    }
    rstd[s] = 1 / std::sqrt(variance[s] + precision.eps);
  }
  return lost_digits;
}

void update_running_statistics(const at::Tensor& statistics, double count, double momentum,
                               const at::Tensor& running_mean, const at::Tensor& running_var) {
  const auto* mean = statistics.const_data_ptr<double>();
  if (running_mean.defined()) blend(running_mean, mean, 1, momentum);
  if (running_var.defined())
    blend(running_var, mean + kVariance * statistics.size(1), count / (count - 1), momentum);
}

at::Tensor gradient_of_affine(const at::Tensor& of_affine, int64_t row,
                              const at::Tensor& parameter) {
  auto gradient = at::empty(parameter.sizes(), at::TensorOptions().dtype(parameter.scalar_type()));
  const int64_t n = gradient.numel();
  const auto* from = of_affine.const_data_ptr<double>() + row * n;
  passes::dispatch(gradient, [&](auto zero) {
    using T = decltype(zero);
    loops::of<T>(*loops::capability().tables).narrow(from, n, passes::mutable_data<T>(gradient));
  });
  return gradient;
}

}  // namespace syncnorm::kernels
