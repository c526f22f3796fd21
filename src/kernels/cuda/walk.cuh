#pragma once

#include <initializer_list>

#include "kernels/cuda/device.cuh"

/// How threads go through memory: runs of consecutive elements, and tiles of a matrix.
namespace syncnorm::kernels::cuda {

/// Runs of `inner` elements, seen as vectors that lie on 16-byte boundaries, so that the first and
/// the last vector of a run may be there in part only.
struct Runs {
  int64_t inner = 0;
  int64_t vectors = 0;   ///< of each run
  int misalignment = 0;  ///< elements from the last boundary to element 0
};

/// The elements by which all arrays miss a boundary of 16 bytes (null ones do not count), or -1
/// where they differ: then only single elements can be loaded.
inline int misalignment(int64_t element, std::initializer_list<const void*> arrays) {
  int found = -1;
  for (const void* array : arrays) {
    if (array == nullptr) continue;
    const int bytes = static_cast<int>(reinterpret_cast<uintptr_t>(array) % 16);
    if (bytes % element != 0 || (found >= 0 && bytes != found)) return -1;
    found = bytes;
  }
  return found < 0 ? 0 : static_cast<int>(found / element);
}

template <int V>
Runs runs_of(int64_t inner, int misalignment) {
  if (inner == 0 || V == 1) return {inner, inner, 0};
  if (inner % V == 0) return {inner, inner / V + (misalignment == 0 ? 0 : 1), misalignment};
  return {inner, (inner + 2 * V - 2) / V, misalignment};
}

/// One lane's way through the vectors [from, from + count) of runs that begin `stride` elements
/// apart; a team of lanes takes vectors that lie side by side.
template <int V>
class Walk {
 public:
  __device__ Walk(const Runs& runs, int64_t start, int64_t stride, int64_t from, int64_t count,
                  int lane, int team)
      : runs_(runs), stride_(stride), left_(count - lane), team_(team) {
    int64_t vector = from + lane;
    int64_t run = 0;
    if (vector >= runs.vectors && left_ > 0) {
      run = vector / runs.vectors;
      vector -= run * runs.vectors;
    }
    run_ = run;
    vector_ = vector;
    start_ = start + run * stride;
    if (team >= runs.vectors && runs.vectors > 0) {  // then both fit in 32 bits
      step_runs_ = team / static_cast<int>(runs.vectors);
      step_ = team - step_runs_ * static_cast<int>(runs.vectors);
    } else {
      step_runs_ = 0;
      step_ = team;
    }
  }

  __device__ bool more() const { return left_ > 0; }
  /// The run the next piece belongs to, from the first.
  __device__ int64_t run() const { return run_; }

  /// Nothing is valid beyond the end.
  __device__ Piece next() {
    if (left_ <= 0) return {};
    const int offset = V == 1 ? 0 : static_cast<int>((runs_.misalignment + start_) & (V - 1));
    const int64_t first = vector_ * V - offset;
    Piece piece{start_ + first, kWhole<V>};
    if (first < 0) piece.valid &= kWhole<V> << static_cast<int>(-first);
    const int64_t rest = runs_.inner - first;
    if (rest < V) piece.valid &= rest <= 0 ? 0 : kWhole<V> >> static_cast<int>(V - rest);
    left_ -= team_;
    vector_ += step_;
    run_ += step_runs_;
    start_ += step_runs_ * stride_;
    if (vector_ >= runs_.vectors) {
      vector_ -= runs_.vectors;
      ++run_;
      start_ += stride_;
    }
    return piece;
  }
  template <int K>
  __device__ void next_together(Piece (&pieces)[K]) {
#pragma unroll
    for (auto& piece : pieces) piece = next();
  }

 private:
  Runs runs_;
  int64_t stride_, left_, run_, vector_, start_;
  int team_, step_, step_runs_;
};

/// A matrix [rows, width] whose rows begin `stride` elements apart, in tiles of `tile` columns and
/// `rows_each` rows. A block's threads are `lanes` along columns, V each, by kThreads/lanes rows.
struct Tiles {
  int64_t rows = 0, width = 0, stride = 0;
  int lanes = 1, tile = 1;
  int64_t across = 0, rows_each = 1, down = 0;  ///< tiles: [down, across]

  constexpr int64_t items() const { return across * down; }
};

/// Whether rows of all arrays can be read in vectors.
inline bool aligned_rows(int64_t element, int64_t width,
                         std::initializer_list<const void*> arrays) {
  return misalignment(element, arrays) == 0 && width * element % 16 == 0;
}

/// How a matrix is to be cut.
struct Cut {
  int least_lanes = 1, most_lanes = kWarp;
  int64_t tiles = 1;      ///< about so many
  int64_t rows_unit = 1;  ///< each of a multiple of this for every row of threads
  int64_t least_rows = 1;
  int64_t most_rows = INT64_MAX;
};

template <int V>
Tiles tiles_of(int64_t rows, int64_t width, int64_t stride, const Cut& cut) {
  Tiles tiles{rows, width, stride};
  if (width == 0) return tiles;
  tiles.lanes = power_of_two(ceil_div(width, V), cut.least_lanes, cut.most_lanes);
  tiles.tile = tiles.lanes * V;
  tiles.across = ceil_div(width, tiles.tile);
  const int64_t unit = cut.rows_unit * (kThreads / tiles.lanes);
  const int64_t down = std::max<int64_t>(cut.tiles / tiles.across, 1);
  const int64_t rows_each = std::max(ceil_div(rows, down), cut.least_rows);
  tiles.rows_each = std::min(ceil_div(rows_each, unit) * unit, cut.most_rows);
  tiles.down = std::max<int64_t>(ceil_div(rows, tiles.rows_each), 1);  // none has sums, too: zero
  return tiles;
}

/// A thread's place in one tile.
template <int V>
struct TilePlace {
  int lane, y, ys;
  int64_t column, across, down, row, end;  ///< row: its first; end: of the tile
  bool inside;                             ///< the thread has columns of the matrix

  __device__ TilePlace(const Tiles& tiles, int64_t item)
      : lane(this_thread() % tiles.lanes),
        y(this_thread() / tiles.lanes),
        ys(kThreads / tiles.lanes),
        down(item / tiles.across) {
    across = item - down * tiles.across;
    column = across * tiles.tile + lane * V;
    row = down * tiles.rows_each + y;
    end = tiles.rows < (down + 1) * tiles.rows_each ? tiles.rows : (down + 1) * tiles.rows_each;
    inside = column < tiles.width;
  }

  /// The thread's columns of the row `k` rows of threads further.
  __device__ WholePiece piece(const Tiles& tiles, int64_t from_row, int k) const {
    const int64_t at = from_row + static_cast<int64_t>(k) * ys;
    return {at * tiles.stride + column, inside && at < end};
  }
  template <int K>
  __device__ void together(const Tiles& tiles, int64_t from_row, WholePiece (&pieces)[K]) const {
#pragma unroll
    for (int k = 0; k < K; ++k) pieces[k] = piece(tiles, from_row, k);
  }
};

}  // namespace syncnorm::kernels::cuda
