#pragma once

#include "kernels/cuda/device.cuh"

/// Small kernels that add partial sums, in order.
namespace syncnorm::kernels::cuda {

/// For row w of 2 and column i < width: the sum over p < parts of
/// from[w*row_stride + p*part_stride + i].
struct FoldColumns {
  const double* from = nullptr;
  int64_t parts = 0, width = 0;
  int64_t row_stride = 0, part_stride = 0;
  bool both = true;             ///< otherwise row 1 alone, written as the first
  double* to = nullptr;         ///< [2 or 1, width]; null: not wanted
  MutableValues first, second;  ///< [width] each, likewise
};
Status launch(const FoldColumns& fold, const Resources& resources);

/// Of the sums of cells [2, cells] to those of slots [layout.sums(), slots], each times the cell's
/// share or the weight of its row, where given.
struct FoldSlots {
  const double* of_cells = nullptr;
  Layout layout;
  Values weight;
  bool shared_out = false;
  double* of_slots = nullptr;
};
Status launch(const FoldSlots& fold, const Resources& resources);

/// Whether the layout says which cells a slot has.
inline bool foldable(const Layout& layout) {
  return layout.slot_of_cell == nullptr ||
         (layout.cells_by_slot != nullptr && layout.slot_begin != nullptr);
}

}  // namespace syncnorm::kernels::cuda
