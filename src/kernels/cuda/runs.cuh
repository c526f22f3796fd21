#pragma once

#include "kernels/cuda/walk.cuh"

/// How passes that write an output for each element share out the runs of all cells.
namespace syncnorm::kernels::cuda {

constexpr int64_t kTiles = 16;           // for each multiprocessor, where there is so much to do
constexpr int64_t kRounds = 4;           // of kTogether vectors a thread, at most, in runs
constexpr int64_t kMostRows = kThreads;  // whose coefficients a block keeps
constexpr int kLeastLanes = 4;           // by column: so that a tile has no more rows than that

/// Runs one after another: `runs_each` short ones a block, or a part of a long one.
struct RunPlan {
  Runs runs;
  int64_t count = 0;      ///< runs
  int64_t runs_each = 1;  ///< at most kMostRows
  int64_t parts = 1, vectors_each = 0;
  int64_t items = 0;
};

inline RunPlan plan_runs(const Layout& layout, const Runs& runs, int64_t tiles) {
  RunPlan plan;
  plan.runs = runs;
  plan.count = layout.outer * layout.cells;
  if (plan.count == 0 || runs.vectors == 0) return plan;
  const int64_t round = kThreads * kTogether;
  const int64_t each =
      std::clamp(ceil_div(plan.count * runs.vectors, tiles), round, kRounds * round);
  if (runs.vectors >= each) {
    plan.parts = ceil_div(runs.vectors, each);
    plan.vectors_each = ceil_div(runs.vectors, plan.parts);
  } else {
    plan.runs_each = std::min(each / runs.vectors, kMostRows);
    plan.vectors_each = plan.runs_each * runs.vectors;
  }
  plan.items = ceil_div(plan.count, plan.runs_each) * plan.parts;
  return plan;
}

/// What one block takes of them at a time.
struct RunItem {
  int64_t first_run, runs;  ///< up to kMostRows of them
  int64_t from, vectors;    ///< of these runs

  __device__ RunItem(const RunPlan& plan, int64_t item) {
    const int64_t group = item / plan.parts;
    first_run = group * plan.runs_each;
    runs = plan.count - first_run < plan.runs_each ? plan.count - first_run : plan.runs_each;
    from = (item - group * plan.parts) * plan.vectors_each;
    const int64_t rest = runs * plan.runs.vectors - from;
    vectors = rest < plan.vectors_each ? rest : plan.vectors_each;
  }
};

/// Tiles of columns that are cells, and of the columns of weight and bias.
template <int V>
Tiles tiles_of_cells(const Layout& layout, int64_t tiles) {
  return tiles_of<V>(layout.outer, layout.cells, layout.cells, {1, kWarp, tiles, kTogether});
}
template <int V>
Tiles tiles_by_column(const Layout& layout, int64_t tiles) {
  const int64_t rows = std::max<int64_t>(layout.affine_rows, 1);
  return tiles_of<V>(layout.cells / rows, layout.inner, layout.affine_rows * layout.inner,
                     {kLeastLanes, kThreads, ceil_div(tiles, rows), kTogether, 1, kMostRows});
}

}  // namespace syncnorm::kernels::cuda
