#include "autograd/application.h"

namespace syncnorm {

Cells::Cells(const NormLayout& layout, const at::Tensor& mean_of_slots,
             const at::Tensor& rstd_of_slots, at::ScalarType dtype)
    : rstd(layout.to_cells(rstd_of_slots)) {
  const auto mean = layout.to_cells(mean_of_slots);
  center = mean.to(dtype).to(at::kDouble);
  rest = mean - center;
  shift = -rest * rstd;
}

Affine::Affine(const at::Tensor& weight, const at::Tensor& bias, const NormInput& input,
               const NormLayout& layout) {
  if (weight.numel() == 0) return;
  const auto options = input.data.options();
  if (!layout.by_column) {
    of_cells = layout.affine_to_cells(weight.detach().to(at::kDouble));
    if (bias.numel() > 0) bias_of_cells = layout.affine_to_cells(bias.detach().to(at::kDouble));
    return;
  }
  columns.rows = layout.affine_rows;
  columns.weight = weight.detach().to(options).contiguous();
  if (bias.numel() > 0) columns.bias = bias.detach().to(options).contiguous();
}

at::Tensor apply_forward(const NormInput& input, const NormLayout& layout, const at::Tensor& weight,
                         const at::Tensor& bias, const at::Tensor& mean, const at::Tensor& rstd) {
  const Cells cells(layout, mean, rstd, input.data.scalar_type());
  const Affine affine(weight, bias, input, layout);
  auto shift = affine.scaled(cells.shift);
  if (affine.bias_of_cells.defined()) shift = shift + affine.bias_of_cells;
  const auto coefficients = at::stack({cells.center, affine.scaled(cells.rstd), shift});
  auto y = at::empty_like(input.data, input.data.options(), input.format);
  kernels::kernels_for(y.device())
      .apply(input.data, input.layout, coefficients.to(y.scalar_type()), affine.columns, y);
  return y;
}

LocalSums backward_sums(const NormInput& input, const NormLayout& layout, const Cells& cells,
                        const Affine& affine, const at::Tensor& dy) {
  const auto sums =
      kernels::kernels_for(dy.device())
          .backward_sums(input.data, dy, input.layout,
                         at::stack({cells.center, cells.rstd, cells.shift}), affine.columns);
  // From sum(g * (x - center)) to sum(g * xhat).
  sums.slots[1].sub_(cells.rest * sums.slots[0]).mul_(cells.rstd);
  LocalSums result;
  result.of_affine = affine.columns.any() ? sums.columns.flip(0)
                                          : at::stack({layout.cells_to_affine(sums.slots[0]),
                                                       layout.cells_to_affine(sums.slots[1])});
  const auto of_slots = layout.to_slots(affine.scaled(sums.slots));
  result.of_slots = layout.centered ? of_slots : of_slots.narrow(0, 1, 1);
  return result;
}

at::Tensor apply_backward(const NormInput& input, const NormLayout& layout, const Cells& cells,
                          const Affine& affine, const at::Tensor& dy, const at::Tensor& means) {
  const auto correction = layout.share.defined() ? cells.rstd * layout.share : cells.rstd;
  const auto b = -correction * layout.to_cells(means[means.size(0) - 1]);
  auto c = b * cells.shift;
  if (layout.centered) c = c - correction * layout.to_cells(means[0]);
  const auto coefficients = at::stack({cells.center, cells.rstd, affine.scaled(cells.rstd), b, c});
  auto dx = at::empty_like(input.data, input.data.options(), input.format);
  kernels::kernels_for(dx.device())
      .backward_apply(input.data, dy, input.layout, coefficients.to(dx.scalar_type()),
                      affine.columns, dx);
  return dx;
}

at::Tensor gradient_of(const at::Tensor& parameter, const at::Tensor& sum) {
  if (parameter.numel() == 0) return at::zeros_like(parameter);
  return sum.reshape(parameter.sizes()).to(parameter.scalar_type());
}

}  // namespace syncnorm
