#pragma once

#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/walk.cuh"

/// Two sums of every cell, where a cell's values lie in runs: a few lanes, a warp, a block or
/// several blocks a cell.
namespace syncnorm::kernels::cuda {

/// Blocks for each multiprocessor that a pass over all memory is cut into, where it can be: so many
/// that the last ones to run are a small part.
constexpr int kSplitBlocks = 32;
/// The least vectors worth a block of their own.
constexpr int64_t kSplitVectors = int64_t{2} * kThreads * kTogether;

struct CellPlan {
  Runs runs;
  int64_t vectors = 0;  ///< of a cell
  int64_t vectors_each = 0;
  int team = 1;    ///< lanes that share a cell, or the whole block
  int splits = 1;  ///< blocks that share a cell
  int64_t items = 0;
};

/// Doubles of partial sums, at most.
inline int64_t partials_of_cells(int64_t cells, int multiprocessors) {
  return 2 * (cells + int64_t{kSplitBlocks} * std::max(multiprocessors, 1));
}

inline CellPlan plan_cells(const Layout& layout, const Runs& runs, int multiprocessors) {
  CellPlan plan;
  plan.runs = runs;
  if (layout.cells == 0) return plan;
  const int64_t processors = std::max(multiprocessors, 1);
  plan.vectors = plan.vectors_each = layout.outer * runs.vectors;
  plan.team = power_of_two(ceil_div(plan.vectors, kTogether), 1, kWarp);
  const int64_t of_warp = kWarp * kTogether;
  if (plan.vectors > 16 * of_warp || (plan.vectors > of_warp && layout.cells < 64 * processors))
    plan.team = kThreads;
  if (plan.team < kThreads) {
    plan.items = ceil_div(layout.cells, kThreads / plan.team);
    return plan;
  }
  if (layout.cells < std::min(kCounters, kSplitBlocks * processors))
    plan.splits = static_cast<int>(std::max<int64_t>(
        std::min(kSplitBlocks * processors / layout.cells, plan.vectors / kSplitVectors), 1));
  plan.vectors_each = ceil_div(plan.vectors, plan.splits);
  plan.items = layout.cells * plan.splits;
  return plan;
}

/// Calls finish(cell, sums) in one thread for each cell, with the sums over the cell's lanes of
/// add(cell, walk). `block` of `blocks`; partials: [cells, splits] Sums.
template <int V, typename Add, typename Finish>
__device__ inline void sum_cells(const CellPlan& plan, const Layout& layout, int64_t block,
                                 int64_t blocks, double* partials, int32_t* counters,
                                 BlockShared& shared, Add&& add, Finish&& finish) {
  const int lane = this_thread() % plan.team;
  const int64_t stride = layout.cells * layout.inner;
  if (plan.team < kThreads) {
    const int64_t each = kThreads / plan.team;
    for (int64_t item = block; item < plan.items; item += blocks) {
      const int64_t cell = item * each + this_thread() / plan.team;
      Sums sums;
      if (cell < layout.cells)
        sums = add(cell, Walk<V>(plan.runs, cell * layout.inner, stride, 0, plan.vectors, lane,
                                 plan.team));
      sums = sum_of_team(sums, plan.team);
      if (lane == 0 && cell < layout.cells) finish(cell, sums);
    }
    return;
  }
  for (int64_t item = block; item < plan.items; item += blocks) {
    const int64_t cell = item / plan.splits;
    const int split = static_cast<int>(item - cell * plan.splits);
    const int64_t from = split * plan.vectors_each;
    const int64_t rest = plan.vectors - from;
    auto sums =
        add(cell, Walk<V>(plan.runs, cell * layout.inner, stride, from,
                          rest < plan.vectors_each ? rest : plan.vectors_each, lane, kThreads));
    sums = sum_of_block(sums, shared);
    if (plan.splits > 1) {
      double* partial = partials + 2 * cell * plan.splits;
      if (this_thread() == 0) {
        partial[2 * split] = sums.first;
        partial[2 * split + 1] = sums.second;
      }
      if (!arrives_last(counters + cell, plan.splits, shared.is_last)) continue;
      sums = {};
      for (int s = this_thread(); s < plan.splits; s += kThreads) {
        sums.first += load_partial(partial + 2 * s);
        sums.second += load_partial(partial + 2 * s + 1);
      }
      sums = sum_of_block(sums, shared);
    }
    if (this_thread() == 0) finish(cell, sums);
  }
}

}  // namespace syncnorm::kernels::cuda
