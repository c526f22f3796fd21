#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

namespace syncnorm {

/// How a dense tensor's memory is cut into cells: element (o, c, i) of [outer, cells, inner] lies
/// at (o*cells + c)*inner + i. NCHW batch norm is [N, C, H*W], channels-last [N*H*W, C, 1], rows of
/// a hidden dimension [1, rows, hidden].
struct CellLayout {
  int64_t outer = 0;
  int64_t cells = 0;
  int64_t inner = 0;

  int64_t numel() const { return outer * cells * inner; }
};

/// Values a slot holds over all ranks.
struct SlotCount {
  double all = 0;    ///< the same for every slot
  at::Tensor each;   ///< or double [slots]
  at::Tensor total;  ///< or double [1] on the device, of `slots_of_total` slots alike
  double slots_of_total = 1;

  /// Something to divide sums by: at least 1, since sums of nothing must stay zero, not NaN.
  at::Tensor divisor(const at::Tensor& like) const;
};

/// What a norm is, as data: how the elements of its input belong to slots, and how weight and bias
/// belong to elements.
///
/// The input, in row-major order, is [outer, cells, inner]. Statistics belong to slots; a slot is a
/// cell or the union of several.
struct NormLayout {
  CellLayout cells;
  const char* unit = "slots";  ///< what error messages call a slot
  int64_t slots = 0;
  at::Tensor slot_of_cell;  ///< int64 [cells]; undefined: each cell is a slot of its own

  /// Cell c takes row c % affine_rows of the weight, which is [affine_rows] or, `by_column`,
  /// [affine_rows, inner]. By column only with outer == 1.
  int64_t affine_rows = 1;
  bool by_column = false;

  /// Values a slot holds over all ranks, where that is known beforehand; otherwise (zero) the
  /// ranks' `values` are added up and shared out to `slots_of_values` slots.
  SlotCount count;
  int64_t values = 0;
  int64_t slots_of_values = 1;
  std::optional<int64_t> total_values;  ///< what `values` must add up to, where that is known

  /// 1 where a cell counts in the statistics, 0 where another rank holds the same cell and counts
  /// it: double [cells]; undefined: all 1. Backward takes the gradients of copies as parts of one.
  at::Tensor share;

  /// Weight and bias are whole on every rank and see a part of the input: their gradients are
  /// summed over the ranks in the collective of the backward.
  bool sum_affine_gradients = false;

  bool centered = true;
  bool keeps_format = false;  ///< channels-last memory is read as it is

  int64_t sums() const { return centered ? 2 : 1; }  ///< that travel for each slot
  /// Of [2, affine_rows] or [2, affine_rows, inner], the gradients of bias and weight.
  std::vector<int64_t> affine_shape() const;

  at::Tensor to_slots(const at::Tensor& of_cells) const;  ///< sums [k, cells] to [k, slots]
  at::Tensor to_cells(const at::Tensor& of_slots) const;  ///< spreads [slots] to [cells]
  /// Weight or bias [affine_rows] spread to [cells].
  at::Tensor affine_to_cells(const at::Tensor& values) const;
  /// Its inverse for gradients: sums [cells] to [affine_rows].
  at::Tensor cells_to_affine(const at::Tensor& of_cells) const;
  /// Weight or bias, by column or not, as a factor for [outer, cells, inner]; and the inverse.
  at::Tensor spread_affine(const at::Tensor& values) const;
  at::Tensor sum_affine(const at::Tensor& of_elements) const;
};

/// Slots are the channels of [N, C, ...].
NormLayout channel_layout(const at::Tensor& x);

/// Slots are the rows of [..., h]; `hidden` is their length over all ranks.
NormLayout row_layout(const at::Tensor& x, int64_t hidden, bool centered);

/// Slots are the groups of channels of each sample of x [N, c, ...]: `group_of_channel` has c
/// entries in [0, groups).
NormLayout group_layout(const at::Tensor& x, const std::vector<int64_t>& group_of_channel,
                        int64_t groups);

/// A norm's input as the kernels read it: dense.
struct NormInput {
  NormInput(const at::Tensor& tensor, const NormLayout& norm);

  /// `tensor`, of the same shape, brought to the same memory order and dtype.
  at::Tensor match(const at::Tensor& tensor) const;
  at::Tensor empty_like() const { return at::empty(data.sizes(), data.options(), format); }

  at::Tensor data;
  at::MemoryFormat format;
  CellLayout layout;  ///< as it lies in memory; the same cells as NormLayout::cells
};

/// float for half and bfloat16, otherwise `dtype`.
at::ScalarType compute_dtype(at::ScalarType dtype);

}  // namespace syncnorm
