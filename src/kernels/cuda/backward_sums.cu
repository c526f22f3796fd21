#include "kernels/cuda/backward.cuh"
#include "kernels/cuda/cells.cuh"
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/fold.cuh"
#include "kernels/cuda/front.cuh"

namespace syncnorm::kernels::cuda {
namespace {

constexpr int kLaneRounds = 4;    // of loads, whose sums are kept in lanes
constexpr int kLeastLanes = 8;    // by column: so that a batch has no more than kMostRows rows
constexpr int kMostRows = 128;    // whose coefficients a block keeps
constexpr int kRowTiles = 4;      // by column, for each multiprocessor
constexpr int kLeastRows = 64;    // by column: of a tile, to keep its partial sums few
constexpr int kLaneBatches = 16;  // by column: of kTogether rows, whose sums are kept in lanes

/// Where sums go on their way.
struct Places {
  double* of_cells = nullptr;  ///< [2, cells], to be folded; null: slots and affine rows are cells
  double* partials = nullptr;
  double* of_columns = nullptr;  ///< by column: [down, 2, affine_rows*inner]; null: not wanted
  int32_t* counters = nullptr;
  int front = 0;  ///< 1: block 0 writes the header
};

bool wants_affine(const BackwardSums& call) {
  return call.of_affine != nullptr || call.dbias.data != nullptr || call.dweight.data != nullptr;
}

/// Whether the sums of cells are those of slots and of the rows of weight and bias.
bool simple(const BackwardSums& call) {
  const auto& layout = call.of.layout;
  if (layout.slot_of_cell != nullptr) return false;
  return layout.by_column || !wants_affine(call) || layout.affine_rows == layout.cells;
}

__device__ inline void write_slot(const BackwardSums& call, int64_t slot, double weight,
                                  const Sums& sums) {
  const auto& layout = call.of.layout;
  if (layout.centered) call.of_slots[slot] = weight * sums.first;
  call.of_slots[(layout.sums() - 1) * layout.slots + slot] = weight * sums.second;
}

__device__ inline void finish_cell(const BackwardSums& call, const Places& places, int64_t cell,
                                   const Sums& sums) {
  const auto& layout = call.of.layout;
  if (places.of_cells != nullptr) {
    places.of_cells[cell] = sums.first;
    places.of_cells[layout.cells + cell] = sums.second;
    return;
  }
  const int64_t row = cell % layout.affine_rows;
  write_slot(call, cell, value_or(call.of.weight, row, 1), sums);
  if (call.of_affine != nullptr) {
    call.of_affine[row] = sums.first;
    call.of_affine[layout.affine_rows + row] = sums.second;
  }
  put(call.dbias, row, sums.first);
  put(call.dweight, row, sums.second);
}

union CellShared {
  BlockShared block;
  FrontShared front;
};

template <typename T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks<T, V>)
    sums_of_cells(const __grid_constant__ BackwardSums call, const __grid_constant__ CellPlan plan,
                  const __grid_constant__ Places places) {
  using A = compute_t<T>;
  auto& shared = shared_memory<CellShared>();
  if (this_block() < places.front) return write_front(call.header, {}, nullptr, 0, shared.front);
  const auto add_cell = [&](int64_t cell, Walk<V> walk) {
    const auto k = outputs_of_cell<A>(call.of, cell);
    Sums sums;
    while (walk.more()) {
      A first = 0, second = 0;
#pragma unroll 1
      for (int round = 0; round < kLaneRounds && walk.more(); ++round) {
        Piece pieces[kPairs];
        walk.next_together(pieces);
        const Inputs<T, V, kPairs> in(call.of, pieces);
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
#pragma unroll
          for (int e = 0; e < V; ++e) {  // what is not there has a gradient of zero
            const A g = in.gradient(call.of, p, e, k);
            first += g;
            second = fused(g, k.xhat(in.x_at(p, e)), second);
          }
        }
      }
      sums.first += first;
      sums.second += second;
    }
    return sums;
  };
  sum_cells<V>(plan, call.of.layout, this_block() - places.front, all_blocks() - places.front,
               places.partials, places.counters, shared.block, add_cell,
               [&](int64_t cell, const Sums& sums) { finish_cell(call, places, cell, sums); });
}

template <typename A, int V>
union ColumnsShared {
  struct {
    ColumnShared<V> columns;
    Outputs<A> of[kWarp * V];
  } tile;
  FrontShared front;
};

/// Columns are cells.
template <typename T, int V, bool recomputes>
__global__ void __launch_bounds__(kThreads, kTileBlocks<T, V>)
    sums_of_columns(const __grid_constant__ BackwardSums call, const __grid_constant__ Tiles tiles,
                    const __grid_constant__ Places places) {
  using A = compute_t<T>;
  constexpr int K = kTilePairs<V, recomputes>;
  auto& all = shared_memory<ColumnsShared<A, V>>();
  if (this_block() < places.front) return write_front(call.header, {}, nullptr, 0, all.front);
  auto& shared = all.tile;
  for (int64_t item = this_block() - places.front; item < tiles.items();
       item += all_blocks() - places.front) {
    const TilePlace<V> place(tiles, item);
    const int64_t base = place.across * tiles.tile;
    shared.columns.clear();
    for (int c = this_thread(); c < tiles.tile && base + c < tiles.width; c += kThreads)
      shared.of[c] = outputs_of_cell<A>(call.of, base + c);
    __syncthreads();
    if (place.inside) {
      Outputs<A> k[V];
#pragma unroll
      for (int e = 0; e < V; ++e) k[e] = shared.of[place.lane * V + e];
      for (int64_t row = place.row; row < place.end; row += int64_t{kLaneRows} * place.ys) {
        A first[V] = {}, second[V] = {};
#pragma unroll 1
        for (int u = 0; u < kLaneRows && row + int64_t{u} * place.ys < place.end; u += K) {
          WholePiece pieces[K];
          place.together(tiles, row + int64_t{u} * place.ys, pieces);
          const Inputs<T, V, K, recomputes> in(call.of, pieces);
#pragma unroll
          for (int p = 0; p < K; ++p) {
            if (!pieces[p].valid) continue;
#pragma unroll
            for (int e = 0; e < V; ++e) {
              const A g = in.gradient(call.of, p, e, k[e]);
              first[e] += g;
              second[e] = fused(g, k[e].xhat(in.x_at(p, e)), second[e]);
            }
          }
        }
#pragma unroll
        for (int e = 0; e < V; ++e) shared.columns.add(e, first[e], second[e]);
      }
    }
    shared.columns.sum_rows(tiles.lanes);
    if (!merge_tiles(tiles, place.across, place.down, places.partials, places.counters,
                     shared.columns))
      continue;
    for (int c = this_thread(); c < tiles.tile && base + c < tiles.width; c += kThreads)
      finish_cell(call, places, base + c, {shared.columns.of(0, c), shared.columns.of(1, c)});
    __syncthreads();
  }
}

template <typename A, int V>
union RowsShared {
  struct {
    ColumnShared<V> columns;
    A of_rows[2][kTogether][kThreads];  ///< of each thread's columns
    Affine<A> of[kMostRows];
  } tile;
  FrontShared front;
};

/// The sums of a batch of rows over the lanes of the tile.
template <typename A, int V>
__device__ inline void finish_rows(const BackwardSums& call, const Tiles& tiles,
                                   const Places& places, const TilePlace<V>& place, int64_t row,
                                   int64_t affine_row, const A (&of_rows)[2][kTogether][kThreads]) {
  const auto& layout = call.of.layout;
  const int team = tiles.lanes / 4 < kWarp ? tiles.lanes / 4 : kWarp;
  const int r = this_thread() / team, lane = this_thread() % team;
  const int k = r / place.ys, y = r % place.ys;
  Sums sums;
  if (k < kTogether)
    for (int l = lane; l < tiles.lanes; l += team) {
      sums.first += of_rows[0][k][y * tiles.lanes + l];
      sums.second += of_rows[1][k][y * tiles.lanes + l];
    }
  sums = sum_of_team(sums, team);
  if (k >= kTogether || lane != 0 || row + r >= place.end) return;
  const int64_t cell = (row + r) * layout.affine_rows + affine_row;
  double* to =
      tiles.across > 1 ? places.partials + place.across * 2 * layout.cells : places.of_cells;
  if (to == nullptr) return write_slot(call, cell, 1, sums);
  to[cell] = sums.first;
  to[layout.cells + cell] = sums.second;
}

/// Rows are cells, weight and bias go by column: the sums of rows and of columns in one pass. The
/// cells that take the same row of the weight form a matrix.
template <typename T, int V>
__global__ void __launch_bounds__(kThreads, kTileBlocks<T, V>)
    sums_by_column(const __grid_constant__ BackwardSums call, const __grid_constant__ Tiles tiles,
                   const __grid_constant__ Places places) {
  using A = compute_t<T>;
  auto& all = shared_memory<RowsShared<A, V>>();
  if (this_block() < places.front) return write_front(call.header, {}, nullptr, 0, all.front);
  auto& shared = all.tile;
  const auto& layout = call.of.layout;
  const int64_t each = tiles.items(), width = layout.affine_rows * layout.inner;
  for (int64_t item = this_block() - places.front; item < each * layout.affine_rows;
       item += all_blocks() - places.front) {
    const int64_t affine_row = item / each;
    const TilePlace<V> place(tiles, item - affine_row * each);
    const int64_t column = affine_row * layout.inner + place.column;
    A weight[V], first[V] = {}, second[V] = {};
#pragma unroll
    for (int e = 0; e < V; ++e)
      weight[e] = place.inside ? static_cast<A>(value_or(call.of.weight, column + e, 1)) : A(0);
    shared.columns.clear();
    int batch = 0;
    for (int64_t row = place.down * tiles.rows_each; row < place.end;
         row += int64_t{kTogether} * place.ys) {
      WholePiece pieces[kTogether];
      Vector<T, V> x[kTogether], dy[kTogether];
      place.together(tiles, row + place.y, pieces);
      for (auto& piece : pieces) piece.at += affine_row * layout.inner;
      load_together<V>(static_cast<const T*>(call.of.x), pieces, x);
      load_together<V>(static_cast<const T*>(call.of.dy), pieces, dy);
      const int64_t mine = row + this_thread();
      if (this_thread() < kTogether * place.ys && mine < place.end)
        shared.of[this_thread()] =
            outputs_of_cell<A>(call.of, mine * layout.affine_rows + affine_row).xhat;
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        A sum = 0, product = 0;
        if (pieces[k].valid) {
          const auto xhat_of = shared.of[k * place.ys + place.y];
#pragma unroll
          for (int e = 0; e < V; ++e) {
            const A g = widen(dy[k].values[e]), xhat = xhat_of(widen(x[k].values[e]));
            first[e] += g;
            second[e] = fused(g, xhat, second[e]);
            const A weighted = g * weight[e];
            sum += weighted;
            product = fused(weighted, xhat, product);
          }
        }
        shared.of_rows[0][k][this_thread()] = sum;
        shared.of_rows[1][k][this_thread()] = product;
      }
      if (++batch == kLaneBatches) {
        batch = 0;
#pragma unroll
        for (int e = 0; e < V; ++e) {
          shared.columns.add(e, first[e], second[e]);
          first[e] = second[e] = 0;
        }
      }
      __syncthreads();
      finish_rows<A>(call, tiles, places, place, row, affine_row, shared.of_rows);
    }
    if (places.of_columns != nullptr) {
#pragma unroll
      for (int e = 0; e < V; ++e) shared.columns.add(e, first[e], second[e]);
      shared.columns.sum_rows(tiles.lanes);
      double* to = places.of_columns + place.down * 2 * width + affine_row * layout.inner;
      for (int q = this_thread(); q < 2 * tiles.tile; q += kThreads) {
        const int which = q / tiles.tile, c = q % tiles.tile;
        const int64_t at = place.across * tiles.tile + c;
        if (at < tiles.width) to[which * width + at] = shared.columns.of(which, c);
      }
    }
    __syncthreads();
  }
}

/// Sizes and places of one call, for vectors of V elements.
template <int V>
struct Plan {
  CellPlan cells;
  Tiles tiles;
  Places places;
  int64_t words = 0;

  Plan(const BackwardSums& call, int offset, int multiprocessors, double* workspace) {
    const auto& layout = call.of.layout;
    const auto take = [&](int64_t count) {
      double* at = workspace == nullptr ? nullptr : workspace + words;
      words += count;
      return at;
    };
    if (!simple(call)) places.of_cells = take(2 * layout.cells);
    if (layout.by_column) {
      const int64_t repeats = layout.cells / std::max<int64_t>(layout.affine_rows, 1);
      const int64_t wanted = ceil_div(int64_t{kRowTiles} * std::max(multiprocessors, 1),
                                      std::max<int64_t>(layout.affine_rows, 1));
      tiles = tiles_of<V>(repeats, layout.inner, layout.affine_rows * layout.inner,
                          {kLeastLanes, kThreads, wanted, kTogether, kLeastRows});
      places.partials = take(tiles.across > 1 ? tiles.across * 2 * layout.cells : 0);
      if (wants_affine(call)) {
        double* of_columns = take(tiles.down * 2 * layout.affine_rows * layout.inner);
        places.of_columns = of_columns;
      }
    } else if (layout.inner == 1) {
      tiles = tiles_of_columns<V>(layout, multiprocessors);
      places.partials = take(partials_of(tiles));
    } else {
      cells = plan_cells(layout, runs_of<V>(layout.inner, offset), multiprocessors);
      places.partials = take(partials_of_cells(layout.cells, multiprocessors));
    }
  }
};

/// What is left to do once the pass has run.
Status fold(const BackwardSums& call, const Places& places, const Tiles& tiles,
            const Resources& resources) {
  const auto& layout = call.of.layout;
  const bool folds = !simple(call);
  Status status = cudaSuccess;
  if (layout.by_column && tiles.across != 1) {
    FoldColumns rows;
    rows.from = places.partials;
    rows.parts = tiles.across;
    rows.width = rows.row_stride = layout.cells;
    rows.part_stride = 2 * layout.cells;
    rows.both = folds || layout.centered;
    rows.to = folds ? places.of_cells : call.of_slots;
    status = launch(rows, resources);
  }
  if (status == cudaSuccess && folds) {
    FoldSlots slots;
    slots.of_cells = places.of_cells;
    slots.layout = layout;
    if (!layout.by_column) slots.weight = call.of.weight;
    slots.of_slots = call.of_slots;
    status = launch(slots, resources);
  }
  if (status != cudaSuccess || !wants_affine(call) || !(folds || layout.by_column)) return status;
  FoldColumns affine;
  affine.from = layout.by_column ? places.of_columns : places.of_cells;
  affine.width = layout.affine_rows * (layout.by_column ? layout.inner : 1);
  affine.parts =
      layout.by_column ? tiles.down : layout.cells / std::max<int64_t>(layout.affine_rows, 1);
  affine.row_stride = layout.by_column ? affine.width : layout.cells;
  affine.part_stride = layout.by_column ? 2 * affine.width : affine.width;
  affine.to = call.of_affine;
  affine.first = call.dbias;
  affine.second = call.dweight;
  return launch(affine, resources);
}

template <typename T>
Status launch_as(const BackwardSums& call, const Resources& resources) {
  using A = compute_t<T>;
  const auto& of = call.of;
  const auto& layout = of.layout;
  const void* output = of.gate == Gate::output ? of.output : nullptr;
  const bool tiled = layout.by_column || layout.inner == 1;
  const int64_t width = layout.by_column ? layout.inner : layout.cells;
  const int offset = misalignment(sizeof(T), {of.x, of.dy, output});
  const bool aligned = tiled ? aligned_rows(sizeof(T), width, {of.x, of.dy, output}) : offset >= 0;
  return with_vectors<T>(aligned, [&](auto length) {
    constexpr int V = decltype(length)::value;
    Plan<V> plan(call, offset, resources.multiprocessors,
                 static_cast<double*>(resources.workspace));
    plan.places.counters = resources.counters;
    plan.places.front = call.header.to != nullptr;
    const auto queue = [&](auto kernel, size_t shared, int64_t items, const auto& cut) {
      return launch_kernel(kernel, grid_for(items, resources) + plan.places.front, shared,
                           resources, call, cut, plan.places);
    };
    const Status status =
        layout.by_column ? queue(sums_by_column<T, V>, sizeof(RowsShared<A, V>),
                                 plan.tiles.items() * layout.affine_rows, plan.tiles)
        : !tiled ? queue(sums_of_cells<T, V>, sizeof(CellShared), plan.cells.items, plan.cells)
                 : with_gate(of.gate, [&](auto recomputes) {
                     return queue(sums_of_columns<T, V, decltype(recomputes)::value>,
                                  sizeof(ColumnsShared<A, V>), plan.tiles.items(), plan.tiles);
                   });
    return status == cudaSuccess ? fold(call, plan.places, plan.tiles, resources) : status;
  });
}

}  // namespace

int64_t backward_sums_workspace(const BackwardSums& call, int multiprocessors) {
  int64_t words = 0;
  if (valid(call.of.layout))
    dispatch(call.of.dtype, [&](auto element) {
      constexpr int V = kVectorLength<decltype(element)>;
      words = std::max(Plan<V>(call, 0, multiprocessors, nullptr).words,
                       Plan<1>(call, 0, multiprocessors, nullptr).words);
      return Status{cudaSuccess};
    });
  return words * static_cast<int64_t>(sizeof(double));
}

Status launch(const BackwardSums& call, const Resources& resources) {
  if (!valid(call.of.layout) || !foldable(call.of.layout) || !valid_backward(call.of))
    return cudaErrorInvalidValue;
  return dispatch(call.of.dtype,
                  [&](auto element) { return launch_as<decltype(element)>(call, resources); });
}

}  // namespace syncnorm::kernels::cuda
