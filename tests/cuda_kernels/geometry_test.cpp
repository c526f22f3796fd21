// How work is cut up: everything once, with sizes beyond 32 bits, which no test has memory for.
#include <vector>

#include "cuda_kernels/problem.h"
#include "kernels/cuda/cells.cuh"
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/runs.cuh"

namespace syncnorm::kernels::cuda::testing {
namespace {

constexpr int64_t kHuge = int64_t{1} << 34;

TEST(CudaGeometry, WalkMeetsEveryElementOnce) {
  constexpr int V = 4;
  for (const int64_t inner : {1, 2, 3, 4, 5, 7, 8, 31, 49, 64})
    for (int offset = 0; offset < V; ++offset)
      for (const int team : {1, 2, 8, 32, 256}) {
        const auto runs = runs_of<V>(inner, offset);
        const int64_t cells = 3, count = 5, stride = cells * inner, start = inner;
        std::vector<int> met(static_cast<size_t>(count * stride));
        // Two walks, as two blocks that share the work.
        const int64_t all = count * runs.vectors, first = all / 3;
        for (const auto& [from, vectors] : {std::pair{int64_t{0}, first}, {first, all - first}})
          for (int lane = 0; lane < team; ++lane)
            for (Walk<V> walk(runs, start, stride, from, vectors, lane, team); walk.more();) {
              const int64_t run = walk.run();
              const auto piece = walk.next();
              // Whole vectors lie on boundaries.
              EXPECT_EQ((piece.at + offset) % V, 0);
              for (int e = 0; e < V; ++e) {
                if ((piece.valid >> e & 1) == 0) continue;
                ++met.at(static_cast<size_t>(piece.at + e));
                EXPECT_EQ((piece.at + e) / stride, run);
              }
            }
        for (int64_t i = 0; i < count * stride; ++i)
          ASSERT_EQ(met[i], i / inner % cells == 1 ? 1 : 0) << inner << " " << offset << " " << i;
      }
}

TEST(CudaGeometry, WalkGoesBeyond32Bits) {
  constexpr int V = 8;
  const auto runs = runs_of<V>(kHuge, 0);
  const int64_t stride = 3 * kHuge, from = runs.vectors + runs.vectors / 2;
  Walk<V> walk(runs, kHuge, stride, from, runs.vectors, 5, 256);
  EXPECT_EQ(walk.run(), 1);
  EXPECT_EQ(walk.next().at, kHuge + stride + (runs.vectors / 2 + 5) * V);
  EXPECT_EQ(walk.next().at, kHuge + stride + (runs.vectors / 2 + 5 + 256) * V);
  constexpr int64_t kStride = 1 << 20;
  int64_t steps = 0;
  for (Walk<1> of_short(runs_of<1>(2, 0), kHuge, kStride, kHuge, 3000, 7, 256); of_short.more();
       ++steps) {
    EXPECT_EQ(of_short.run(), kHuge / 2 + 3 + 128 * steps);
    EXPECT_EQ(of_short.next().at, kHuge + (kHuge / 2 + 3 + 128 * steps) * kStride + 1);
  }
  EXPECT_EQ(steps, 12);
}

TEST(CudaGeometry, TilesMeetEveryElementOnce) {
  constexpr int V = 2;
  for (const int64_t rows : {1, 3, 4, 33, 200})
    for (const int64_t width : {2, 6, 64, 130})
      for (const int64_t wanted : {1, 3, 20}) {
        const auto tiles = tiles_of<V>(rows, width, width + 2, {1, kWarp, wanted, kTogether});
        std::vector<int> met(static_cast<size_t>(rows * (width + 2)));
        for (int64_t item = 0; item < tiles.items(); ++item)
          for (int thread = 0; thread < kThreads; ++thread) {
            threadIdx.x = static_cast<unsigned>(thread);
            const TilePlace<V> place(tiles, item);
            for (int64_t row = place.row; row < place.end; row += int64_t{kTogether} * place.ys) {
              WholePiece pieces[kTogether];
              place.together(tiles, row, pieces);
              for (const auto& piece : pieces)
                for (int e = 0; piece.valid && e < V; ++e)
                  ++met.at(static_cast<size_t>(piece.at + e));
            }
          }
        for (int64_t i = 0; i < rows * (width + 2); ++i)
          ASSERT_EQ(met[i], i % (width + 2) < width ? 1 : 0) << rows << " x " << width;
      }
}

TEST(CudaGeometry, TilesGoBeyond32Bits) {
  const auto tiles = tiles_of<4>(kHuge, 1024, 4096, {1, kWarp, 1000, kTogether});
  EXPECT_GE(tiles.down * tiles.rows_each, tiles.rows);
  EXPECT_LT((tiles.down - 1) * tiles.rows_each, tiles.rows);
  threadIdx.x = 37;
  const TilePlace<4> place(tiles, tiles.items() - 1);
  const int64_t row = (tiles.down - 1) * tiles.rows_each + 37 / tiles.lanes;
  EXPECT_EQ(place.piece(tiles, place.row, 0).at,
            row * 4096 + 1024 - tiles.tile + 37 % tiles.lanes * 4);
}

TEST(CudaGeometry, SplitsFitCountersAndWorkspace) {
  for (const int multiprocessors : {0, 1, 7, 132, 1000, 100000})
    for (const int64_t cells : {1, 3, 64, 1000, 5000})
      for (const int64_t inner : {1, 100, 1 << 20, 1 << 30}) {
        Layout layout;
        layout.outer = 16;
        layout.cells = layout.slots = cells;
        layout.inner = inner;
        const auto plan = plan_cells(layout, runs_of<4>(inner, 0), multiprocessors);
        EXPECT_GE(plan.splits * plan.vectors_each, plan.vectors);
        if (plan.splits > 1) {
          EXPECT_LE(cells, kCounters);
        }
        EXPECT_LE(2 * cells * plan.splits, partials_of_cells(cells, multiprocessors));
        layout.outer = inner;
        layout.inner = 1;
        const auto tiles = tiles_of_columns<4>(layout, multiprocessors);
        EXPECT_GE(tiles.down * tiles.rows_each, tiles.rows);
        if (tiles.down > 1) {
          EXPECT_LE(tiles.across * (ceil_div(tiles.down, kMerged) + 1), kCounters);
        }
      }
}

TEST(CudaGeometry, RunsAreSharedOutWhole) {
  for (const int64_t cells : {1, 3, 1000})
    for (const int64_t inner : {1, 49, 5000, 100000})
      for (const int64_t wanted : {1, 16, 2000}) {
        Layout layout;
        layout.outer = 2;
        layout.cells = cells;
        layout.inner = inner;
        const auto plan = plan_runs(layout, runs_of<4>(inner, 1), wanted);
        EXPECT_LE(plan.runs_each, kMostRows);
        int64_t vectors = 0;
        for (int64_t item = 0; item < plan.items; ++item) {
          const RunItem part(plan, item);
          EXPECT_GE(part.runs, 1);
          EXPECT_LE(part.first_run + part.runs, 2 * cells);
          vectors += part.vectors;
        }
        EXPECT_EQ(vectors, 2 * cells * plan.runs.vectors);
      }
}

}  // namespace
}  // namespace syncnorm::kernels::cuda::testing
