#include "kernels/cuda/fold.cuh"
#include "kernels/cuda/reduce.cuh"

namespace syncnorm::kernels::cuda {
namespace {

constexpr int kPartRows = kThreads / kWarp;

struct FoldShared {
  double of_parts[kPartRows][kWarp];
};

/// Blocks take 32 columns; their warps take turns at the parts.
__global__ void __launch_bounds__(kThreads) fold_columns(const __grid_constant__ FoldColumns fold) {
  auto& shared = shared_memory<FoldShared>();
  const int lane = this_thread() % kWarp;
  const int warp = this_thread() / kWarp;
  const int64_t across = ceil_div(fold.width, kWarp);
  const int64_t items = across * (fold.both ? 2 : 1);
  for (int64_t item = this_block(); item < items; item += all_blocks()) {
    const int64_t row = fold.both ? item / across : 1;
    const int64_t i = (fold.both ? item % across : item) * kWarp + lane;
    double sum = 0;
    if (i < fold.width) {
      const double* from = fold.from + row * fold.row_stride + i;
#pragma unroll 4
      for (int64_t p = warp; p < fold.parts; p += kPartRows) sum += from[p * fold.part_stride];
    }
    shared.of_parts[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && i < fold.width) {
      for (int w = 1; w < kPartRows; ++w) sum += shared.of_parts[w][lane];
      if (fold.to != nullptr) fold.to[(fold.both ? row : 0) * fold.width + i] = sum;
      put(row == 0 ? fold.first : fold.second, i, sum);
    }
    __syncthreads();
  }
}

/// A warp for each slot.
__global__ void __launch_bounds__(kThreads) fold_slots(const __grid_constant__ FoldSlots fold) {
  const auto& layout = fold.layout;
  const int lane = this_thread() % kWarp;
  const int64_t each = kThreads / kWarp;
  for (int64_t item = this_block(); item * each < layout.slots; item += all_blocks()) {
    const int64_t slot = item * each + this_thread() / kWarp;
    Sums sums;
    if (slot < layout.slots) {
      const bool listed = layout.slot_of_cell != nullptr;
      const int64_t end = listed ? layout.slot_begin[slot + 1] : slot + 1;
      for (int64_t at = (listed ? layout.slot_begin[slot] : slot) + lane; at < end; at += kWarp) {
        const int64_t cell = listed ? layout.cells_by_slot[at] : at;
        double factor = fold.shared_out ? share_of(layout, cell) : 1;
        factor *= value_or(fold.weight, cell % layout.affine_rows, 1);
        sums.first += factor * fold.of_cells[cell];
        sums.second += factor * fold.of_cells[layout.cells + cell];
      }
    }
    sums = sum_of_team(sums, kWarp);
    if (lane != 0 || slot >= layout.slots) continue;
    if (layout.centered) fold.of_slots[slot] = sums.first;
    fold.of_slots[(layout.sums() - 1) * layout.slots + slot] = sums.second;
  }
}

}  // namespace

Status launch(const FoldColumns& fold, const Resources& resources) {
  const int64_t items = ceil_div(fold.width, kWarp) * (fold.both ? 2 : 1);
  return launch_kernel(fold_columns, grid_for(items, resources), sizeof(FoldShared), resources,
                       fold);
}

Status launch(const FoldSlots& fold, const Resources& resources) {
  const int64_t items = ceil_div(fold.layout.slots, kThreads / kWarp);
  return launch_kernel(fold_slots, grid_for(items, resources), 0, resources, fold);
}

}  // namespace syncnorm::kernels::cuda
