#include "kernels/kernels.h"

namespace syncnorm::kernels {
namespace {

/// [outer, cells, inner] in double.
at::Tensor cells_of(const at::Tensor& dense, const CellLayout& layout) {
  return dense
      .as_strided({layout.outer, layout.cells, layout.inner},
                  {layout.cells * layout.inner, layout.inner, 1})
      .to(at::kDouble);
}

void write(const at::Tensor& values, const CellLayout& layout, const at::Tensor& dense) {
  dense
      .as_strided({layout.outer, layout.cells, layout.inner},
                  {layout.cells * layout.inner, layout.inner, 1})
      .copy_(values);
}

at::Tensor over(const at::Tensor& of_cells) { return of_cells.view({1, -1, 1}); }

at::Tensor sum_cells(const at::Tensor& values) { return values.sum(at::IntArrayRef{0, 2}); }

at::Tensor normalized(const Norm& norm) {
  const auto& layout = norm.layout;
  return (cells_of(norm.input.data, norm.input.layout) -
          over(layout.to_cells(norm.statistics[kMean]))) *
         over(layout.to_cells(norm.statistics[kRstd]));
}

at::Tensor weighted(const Norm& norm, const at::Tensor& values) {
  return norm.weight.defined() ? values * norm.layout.spread_affine(norm.weight.to(at::kDouble))
                               : values;
}

at::Tensor output_of(const Norm& norm) {
  auto y = weighted(norm, normalized(norm));
  if (norm.bias.defined()) y = y + norm.layout.spread_affine(norm.bias.to(at::kDouble));
  if (norm.residual.defined()) y = y + cells_of(norm.residual, norm.input.layout);
  return norm.relu ? y.relu() : y;
}

/// The gradient that passes the activation.
at::Tensor gradient_of(const Norm& norm, const at::Tensor& dy) {
  const auto gradient = cells_of(dy, norm.input.layout);
  if (!norm.relu) return gradient;
  const auto y = norm.output.defined() ? cells_of(norm.output, norm.input.layout) : output_of(norm);
  return gradient.masked_fill(y <= 0, 0);
}

class ReferenceKernels final : public KernelSet {
 public:
  at::Tensor center(const at::Tensor& running_mean) const override {
    return running_mean.to(at::kDouble).nan_to_num(0, 0, 0);
  }

  void moments(const NormInput& x, const NormLayout& layout, const at::Tensor& center,
               const at::Tensor& sums) const override {
    auto shifted = cells_of(x.data, x.layout);
    if (center.defined()) shifted = shifted - over(layout.to_cells(center));
    auto of_cells = at::stack({sum_cells(shifted), sum_cells(shifted * shifted)});
    if (layout.share.defined()) of_cells = of_cells * layout.share;
    sums.copy_(layout.to_slots(layout.centered ? of_cells : of_cells.narrow(0, 1, 1)));
  }

  void add_and_moments(const at::Tensor& x, const at::Tensor& residual, const NormInput& sum,
                       const NormLayout& layout, const at::Tensor& center,
                       const at::Tensor& sums) const override {
    sum.data.copy_(x + residual);
    moments(sum, layout, center, sums);
  }

  bool finish(const at::Tensor& sums, const NormLayout& layout, const at::Tensor& center,
              const SlotCount& count, const Precision& precision,
              const at::Tensor& statistics) const override {
    const auto means = sums / count.divisor(sums);
    auto mean = statistics[kMean], variance = statistics[kVariance];
    bool lost_digits = false;
    if (layout.centered) {
      const auto square = means[0] * means[0];
      mean.copy_(center.defined() ? center + means[0] : means[0]);
      // NaN stays NaN; only the rounding of a difference below zero is cut.
      variance.copy_((means[1] - square).clamp_min(0));
      lost_digits = (square > precision.ratio * (variance + precision.floor)).any().item<bool>();
    } else {
      mean.zero_();
      variance.copy_(means[0]);
    }
    statistics[kRstd].copy_((variance + precision.eps).rsqrt());
    return lost_digits;
  }

  void update_running(const at::Tensor& statistics, double count, double momentum,
                      const at::Tensor& running_mean,
                      const at::Tensor& running_var) const override {
    const auto blend = [&](const at::Tensor& running, const at::Tensor& latest) {
      running.copy_(running.to(at::kDouble) * (1 - momentum) + latest * momentum);
    };
    if (running_mean.defined()) blend(running_mean, statistics[kMean]);
    if (running_var.defined()) blend(running_var, statistics[kVariance] * (count / (count - 1)));
  }

  void apply(const Norm& norm, const at::Tensor& y) const override {
    write(output_of(norm), norm.input.layout, y);
  }

  void backward_sums(const Norm& norm, const at::Tensor& dy, const at::Tensor& of_slots,
                     const at::Tensor& of_affine) const override {
    const auto& layout = norm.layout;
    const auto gradient = gradient_of(norm, dy);
    const auto product = gradient * normalized(norm);
    if (of_affine.defined())
      of_affine.copy_(at::stack({layout.sum_affine(gradient), layout.sum_affine(product)}));
    auto of_cells =
        at::stack({sum_cells(weighted(norm, gradient)), sum_cells(weighted(norm, product))});
    of_slots.copy_(layout.to_slots(layout.centered ? of_cells : of_cells.narrow(0, 1, 1)));
  }

  at::Tensor affine_gradient(const at::Tensor& of_affine, int64_t row,
                             const at::Tensor& parameter) const override {
    return of_affine[row].reshape(parameter.sizes()).to(parameter.scalar_type());
  }

  void backward_apply(const Norm& norm, const at::Tensor& dy, const at::Tensor& sums,
                      const SlotCount& count, const BackwardOutputs& outputs) const override {
    const auto& layout = norm.layout;
    const auto gradient = gradient_of(norm, dy);
    if (outputs.dresidual.defined()) write(gradient, norm.input.layout, outputs.dresidual);
    if (!outputs.dx.defined()) return;
    const auto counted = [&](const at::Tensor& of_slots) {
      const auto of_cells = layout.to_cells(of_slots);
      return over(layout.share.defined() ? of_cells * layout.share : of_cells);
    };
    const auto means = sums / count.divisor(sums);
    auto correction = normalized(norm) * counted(means[means.size(0) - 1]);
    if (layout.centered) correction = correction + counted(means[0]);
    auto dx =
        over(layout.to_cells(norm.statistics[kRstd])) * (weighted(norm, gradient) - correction);
    if (outputs.extra.defined()) dx = dx + cells_of(outputs.extra, norm.input.layout);
    write(dx, norm.input.layout, outputs.dx);
  }
};

}  // namespace

const KernelSet& reference_kernels() {
  static const ReferenceKernels set;
  return set;
}

}  // namespace syncnorm::kernels
