#include "kernels/layout.h"

#include <algorithm>

namespace syncnorm {

at::Tensor SlotCount::divisor(const at::Tensor& like) const {
  if (each.defined()) return each.clamp_min(1);
  if (total.defined()) return (total / slots_of_total).clamp_min(1);
  return at::scalar_tensor(std::max(all, 1.0), like.options().dtype(at::kDouble));
}

std::vector<int64_t> NormLayout::affine_shape() const {
  if (by_column) return {2, affine_rows, cells.inner};
  return {2, affine_rows};
}

at::Tensor NormLayout::to_slots(const at::Tensor& of_cells) const {
  if (!slot_of_cell.defined()) return of_cells;
  return at::zeros({of_cells.size(0), slots}, of_cells.options())
      .index_add(1, slot_of_cell, of_cells);
}

at::Tensor NormLayout::to_cells(const at::Tensor& of_slots) const {
  return slot_of_cell.defined() ? of_slots.index_select(0, slot_of_cell) : of_slots;
}

at::Tensor NormLayout::affine_to_cells(const at::Tensor& values) const {
  if (cells.cells == affine_rows) return values;
  return values.view({1, affine_rows})
      .expand({cells.cells / affine_rows, affine_rows})
      .reshape({cells.cells});
}

at::Tensor NormLayout::cells_to_affine(const at::Tensor& of_cells) const {
  if (cells.cells == affine_rows) return of_cells;
  return of_cells.view({cells.cells / affine_rows, affine_rows}).sum(0);
}

at::Tensor NormLayout::spread_affine(const at::Tensor& values) const {
  if (!by_column) return affine_to_cells(values).view({1, -1, 1});
  const int64_t repeats = affine_rows > 0 ? cells.cells / affine_rows : 0;
  return values.reshape({1, affine_rows, cells.inner})
      .expand({repeats, affine_rows, cells.inner})
      .reshape({1, cells.cells, cells.inner});
}

at::Tensor NormLayout::sum_affine(const at::Tensor& of_elements) const {
  if (!by_column) return cells_to_affine(of_elements.sum(at::IntArrayRef{0, 2}));
  const int64_t repeats = affine_rows > 0 ? cells.cells / affine_rows : 0;
  return of_elements.reshape({repeats, affine_rows, cells.inner}).sum(0);
}

NormLayout channel_layout(const at::Tensor& x) {
  const int64_t samples = x.size(0), channels = x.size(1);
  NormLayout norm;
  norm.cells = {samples, channels, c10::multiply_integers(x.sizes().slice(2))};
  norm.unit = "channels";
  norm.slots = norm.affine_rows = channels;
  norm.values = samples * norm.cells.inner;
  norm.keeps_format = true;
  return norm;
}

NormLayout row_layout(const at::Tensor& x, int64_t hidden, bool centered) {
  NormLayout norm;
  const auto leading = x.sizes().slice(0, x.dim() - 1);
  norm.cells = {1, c10::multiply_integers(leading), x.size(-1)};
  norm.unit = "rows";
  norm.slots = norm.cells.cells;
  norm.by_column = true;
  norm.count.all = static_cast<double>(hidden);
  norm.values = x.size(-1);
  norm.total_values = hidden;
  norm.centered = centered;
  return norm;
}

NormLayout group_layout(const at::Tensor& x, const std::vector<int64_t>& group_of_channel,
                        int64_t groups) {
  const int64_t samples = x.size(0), channels = x.size(1);
  NormLayout norm;
  norm.cells = {1, samples * channels, c10::multiply_integers(x.sizes().slice(2))};
  norm.unit = "groups";
  norm.slots = samples * groups;
  norm.slot_of_cell = (at::arange(samples).mul(groups).view({-1, 1}) +
                       at::tensor(group_of_channel, at::kLong).view({1, -1}))
                          .reshape({-1})
                          .to(x.device());
  norm.affine_rows = channels;
  norm.values = channels * norm.cells.inner;
  norm.slots_of_values = groups;
  return norm;
}

at::ScalarType compute_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

NormInput::NormInput(const at::Tensor& tensor, const NormLayout& norm)
    : format(norm.keeps_format ? tensor.suggest_memory_format() : at::MemoryFormat::Contiguous),
      layout(norm.cells) {
  data = tensor.contiguous(format);
  if (format != at::MemoryFormat::Contiguous)
    layout = {layout.outer * layout.inner, layout.cells, 1};
}

at::Tensor NormInput::match(const at::Tensor& tensor) const {
  if (tensor.scalar_type() == data.scalar_type()) return tensor.contiguous(format);
  return tensor.to(data.scalar_type()).contiguous(format);
}

}  // namespace syncnorm
