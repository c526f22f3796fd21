#pragma once

#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/walk.cuh"

/// Two sums of every column of a matrix.
namespace syncnorm::kernels::cuda {

/// Rows whose sums a thread keeps in lanes before it adds them in double.
constexpr int kLaneRows = 32;
/// Tiles for each multiprocessor.
constexpr int kColumnTiles = 8;
/// Blocks whose sums one block merges; the sums of as many such blocks are merged by the last.
constexpr int kMerged = 32;

/// What a block knows: a sum of V columns for each thread, kept here rather than in registers.
template <int V>
struct ColumnShared {
  double sums[2][V][kThreads];
  int is_last;

  __device__ void clear() {
#pragma unroll
    for (int e = 0; e < V; ++e) sums[0][e][this_thread()] = sums[1][e][this_thread()] = 0;
  }
  __device__ void add(int e, double first, double second) {
    // One after another: all at once they would take more registers than the loop itself.
    volatile double& to = sums[0][e][this_thread()];
    to = to + first;
    volatile double& other = sums[1][e][this_thread()];
    other = other + second;
  }
  /// Over the rows of threads, into the first of them.
  __device__ void sum_rows(int lanes) {
    for (int half = kThreads / 2; half >= lanes; half /= 2) {
      __syncthreads();
      if (this_thread() >= half) continue;
#pragma unroll
      for (int e = 0; e < V; ++e)
        add(e, sums[0][e][this_thread() + half], sums[1][e][this_thread() + half]);
    }
    __syncthreads();
  }
  /// Sum `which` of a column of the tile, once rows are summed.
  __device__ double& of(int which, int column) { return sums[which][column % V][column / V]; }
};

template <int V>
Tiles tiles_of_columns(const Layout& layout, int multiprocessors) {
  // Of tiles below one another there are at least two counters for each column of tiles.
  const int64_t tiles =
      std::min(int64_t{kColumnTiles} * std::max(multiprocessors, 1), kCounters / 2);
  return tiles_of<V>(layout.outer, layout.cells, layout.cells, {1, kWarp, tiles, kLaneRows});
}

/// Doubles of partial sums: of the tiles, and of groups of them.
inline int64_t partials_of(const Tiles& tiles) {
  return 2 * tiles.tile * tiles.across * (tiles.down + ceil_div(tiles.down, kMerged));
}

/// Adds the partial sums [count, 2*tile] to `shared`, in order.
template <int V>
__device__ inline void merge_columns(const double* partials, int64_t count, int tile,
                                     ColumnShared<V>& shared) {
  for (int q = this_thread(); q < 2 * tile; q += kThreads) {
    double sum = 0;
#pragma unroll 8
    for (int64_t p = 0; p < count; ++p) sum += load_partial(partials + p * 2 * tile + q);
    shared.of(q / tile, q % tile) = sum;
  }
  __syncthreads();
}

template <int V>
__device__ inline void put_partial(double* to, int tile, ColumnShared<V>& shared) {
  for (int q = this_thread(); q < 2 * tile; q += kThreads) to[q] = shared.of(q / tile, q % tile);
}

/// From the tile's sums in `shared` to the column's: true in the block that ends up with them.
/// counters: [across, groups + 1].
template <int V>
__device__ inline bool merge_tiles(const Tiles& tiles, int64_t across, int64_t down,
                                   double* partials, int32_t* counters, ColumnShared<V>& shared) {
  if (tiles.down == 1) return true;
  const int words = 2 * tiles.tile;
  const int64_t groups = ceil_div(tiles.down, kMerged), group = down / kMerged;
  const int64_t rest = tiles.down - group * kMerged;
  const int members = static_cast<int>(rest < kMerged ? rest : kMerged);
  double* of_tiles = partials + across * (tiles.down + groups) * words;
  double* of_groups = of_tiles + tiles.down * words;
  int32_t* counter = counters + across * (groups + 1);
  put_partial(of_tiles + down * words, tiles.tile, shared);
  if (!arrives_last(counter + group, members, shared.is_last)) return false;
  merge_columns(of_tiles + group * kMerged * words, members, tiles.tile, shared);
  if (groups == 1) return true;
  put_partial(of_groups + group * words, tiles.tile, shared);
  if (!arrives_last(counter + groups, static_cast<int>(groups), shared.is_last)) return false;
  merge_columns(of_groups, groups, tiles.tile, shared);
  return true;
}

}  // namespace syncnorm::kernels::cuda
