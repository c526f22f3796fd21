#include "kernels/cuda/cells.cuh"
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/fold.cuh"
#include "kernels/cuda/front.cuh"

namespace syncnorm::kernels::cuda {
namespace {

/// Where sums go on their way.
struct Places {
  double* of_cells = nullptr;  ///< [2, cells], to be folded to slots; null: slots are cells
  double* partials = nullptr;
  int32_t* counters = nullptr;
  int front = 0;  ///< 1: block 0 writes header and centers
};

__device__ inline void finish_cell(const Moments& call, const Places& places, int64_t cell,
                                   const Sums& sums) {
  const auto& layout = call.layout;
  if (places.of_cells != nullptr) {
    places.of_cells[cell] = sums.first;
    places.of_cells[layout.cells + cell] = sums.second;
    return;
  }
  const double share = share_of(layout, cell);
  if (layout.centered) call.sums[cell] = share * sums.first;
  call.sums[(layout.sums() - 1) * layout.slots + cell] = share * sums.second;
}

/// Whether a sum of n squares kept float's digits: it did not overflow (nor is NaN), and not so
/// much fell below the smallest normal number that it shows.
__device__ inline bool in_range(float squares, int n) {
  return squares >= 0x1p-100f * static_cast<float>(n) && squares <= 0x1.fffffep127f;
}

/// The sums of n differences from `center` + shift as those from `center`.
__device__ inline Sums moved(double first, double second, double n, double shift) {
  return {first + n * shift, second + shift * (2 * first + n * shift)};
}

__device__ inline void add(const Sums& more, Sums& sums) {
  sums.first += more.first;
  sums.second += more.second;
}

/// The moments of the values that have a bit in `valid`. Floats are summed about the first of them,
/// and so with float's digits however far the center is.
template <bool whole, int N>
__device__ inline Sums moments_of(const float (&values)[N], uint32_t valid, double center,
                                  bool centered) {
  const auto here = [&](int i) { return whole || (valid >> i & 1) != 0; };
  float near = values[0], first = 0, second = 0;
  if (!whole) {
#pragma unroll
    for (int i = N - 1; i >= 0; --i)
      if (here(i)) near = values[i];
  }
  if (!centered) near = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float d = here(i) ? values[i] - near : 0;
    first += d;
    second = fmaf(d, d, second);
  }
  const int n = whole ? N : __popc(valid);
  if (!in_range(second, n)) {
    bool differ = second != 0;  // NaN differs
    Sums sums;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!here(i)) continue;
      differ |= values[i] != near;
      const double d = static_cast<double>(values[i]) - center;
      sums.first += d;
      sums.second = fma(d, d, sums.second);
    }
    if (differ) return sums;
  }
  return moved(first, second, n, static_cast<double>(near) - center);
}

template <bool whole, int N>
__device__ inline Sums moments_of(const double (&values)[N], uint32_t valid, double center, bool) {
  Sums sums;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (!whole && (valid >> i & 1) == 0) continue;
    const double d = values[i] - center;
    sums.first += d;
    sums.second = fma(d, d, sums.second);
  }
  return sums;
}

/// What is to be summed: x, or x + residual, rounded and written.
template <int V, typename T, typename P>
__device__ inline void read(const Moments& call, const P (&pieces)[kTogether],
                            Vector<T, V> (&vectors)[kTogether]) {
  load_together<V>(static_cast<const T*>(call.x), pieces, vectors);
  if (call.residual == nullptr) return;
  Vector<T, V> residual[kTogether];
  load_together<V>(static_cast<const T*>(call.residual), pieces, residual);
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
#pragma unroll
    for (int e = 0; e < V; ++e)
      vectors[k].values[e] = narrow<T>(widen(vectors[k].values[e]) + widen(residual[k].values[e]));
    store<V>(vectors[k], static_cast<T*>(call.sum), pieces[k]);
  }
}

union CellShared {
  BlockShared block;
  FrontShared front;
};

template <typename T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks<T, V>)
    moments_of_cells(const __grid_constant__ Moments call, const __grid_constant__ CellPlan plan,
                     const __grid_constant__ Places places) {
  auto& shared = shared_memory<CellShared>();
  if (this_block() < places.front)
    return write_front(call.header, call.center_from, call.center, call.layout.slots, shared.front);
  const auto& layout = call.layout;
  const auto add_cell = [&](int64_t cell, Walk<V> walk) {
    const double center =
        call.center_from.data == nullptr ? 0 : center_of(call.center_from, slot_of(layout, cell));
    Sums sums;
    while (walk.more()) {
      constexpr int N = kTogether * V;
      constexpr uint32_t all = kWhole<N - 1> << 1 | 1;
      Piece pieces[kTogether];
      Vector<T, V> vectors[kTogether];
      walk.next_together(pieces);
      read<V>(call, pieces, vectors);
      uint32_t valid = 0;
      compute_t<T> values[N];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        valid |= pieces[k].valid << k * V;
#pragma unroll
        for (int e = 0; e < V; ++e) values[k * V + e] = widen(vectors[k].values[e]);
      }
      if (valid == all) {
        add(moments_of<true>(values, valid, center, layout.centered), sums);
      } else if (valid != 0) {
        add(moments_of<false>(values, valid, center, layout.centered), sums);
      }
    }
    return sums;
  };
  sum_cells<V>(plan, layout, this_block() - places.front, all_blocks() - places.front,
               places.partials, places.counters, shared.block, add_cell,
               [&](int64_t cell, const Sums& sums) { finish_cell(call, places, cell, sums); });
}

template <int V>
struct TileShared {
  ColumnShared<V> columns;
  double center[kWarp * V];
};

/// Adds the moments of V columns of up to kLaneRows rows, from `row`.
template <typename T, int V>
__device__ inline void add_rows(const Moments& call, const Tiles& tiles, const TilePlace<V>& place,
                                int64_t row, TileShared<V>& shared) {
  using A = compute_t<T>;
  constexpr bool wide = sizeof(A) == sizeof(double);
  A near[V], first[V], second[V];
  const double* center = shared.center + place.lane * V;
#pragma unroll
  for (int e = 0; e < V; ++e) near[e] = first[e] = second[e] = 0;
#pragma unroll 1
  for (int u = 0; u < kLaneRows && row + int64_t{u} * place.ys < place.end; u += kTogether) {
    WholePiece pieces[kTogether];
    Vector<T, V> vectors[kTogether];
    place.together(tiles, row + int64_t{u} * place.ys, pieces);
    read<V>(call, pieces, vectors);
    if (u == 0 && call.layout.centered) {
#pragma unroll
      for (int e = 0; e < V; ++e)
        near[e] = wide ? static_cast<A>(center[e]) : widen(vectors[0].values[e]);
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (!pieces[k].valid) continue;
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const A d = widen(vectors[k].values[e]) - near[e];
        first[e] += d;
        second[e] = fused(d, d, second[e]);
      }
    }
  }
  const int64_t left = ceil_div(place.end - row, place.ys);
  const int n = static_cast<int>(left < kLaneRows ? left : kLaneRows);
  const T* again = static_cast<const T*>(call.residual == nullptr ? call.x : call.sum);
#pragma unroll
  for (int e = 0; e < V; ++e) {
    Sums sums{first[e], second[e]};
    if (!wide) {
      // Where both are zero all were the same, or so near that no sum of theirs would show.
      if (in_range(static_cast<float>(second[e]), n) || (first[e] == 0 && second[e] == 0)) {
        sums = moved(first[e], second[e], n, static_cast<double>(near[e]) - center[e]);
      } else {
        sums = {};
#pragma unroll 1
        for (int64_t at = row; at < place.end && at < row + int64_t{n} * place.ys; at += place.ys) {
          const double d =
              static_cast<double>(widen(again[at * tiles.stride + place.column + e])) - center[e];
          sums.first += d;
          sums.second = fma(d, d, sums.second);
        }
      }
    }
    shared.columns.add(e, sums.first, sums.second);
  }
}

template <int V>
union ColumnsShared {
  TileShared<V> tile;
  FrontShared front;
};

template <typename T, int V>
__global__ void __launch_bounds__(kThreads, kTileBlocks<T, V>)
    moments_of_columns(const __grid_constant__ Moments call, const __grid_constant__ Tiles tiles,
                       const __grid_constant__ Places places) {
  auto& all = shared_memory<ColumnsShared<V>>();
  const auto& layout = call.layout;
  if (this_block() < places.front)
    return write_front(call.header, call.center_from, call.center, layout.slots, all.front);
  auto& shared = all.tile;
  for (int64_t item = this_block() - places.front; item < tiles.items();
       item += all_blocks() - places.front) {
    const TilePlace<V> place(tiles, item);
    const int64_t base = place.across * tiles.tile;
    shared.columns.clear();
    for (int c = this_thread(); c < tiles.tile; c += kThreads)
      shared.center[c] = call.center_from.data == nullptr || base + c >= tiles.width
                             ? 0
                             : center_of(call.center_from, slot_of(layout, base + c));
    __syncthreads();
    if (place.inside)
      for (int64_t row = place.row; row < place.end; row += int64_t{kLaneRows} * place.ys)
        add_rows<T>(call, tiles, place, row, shared);
    shared.columns.sum_rows(tiles.lanes);
    if (!merge_tiles(tiles, place.across, place.down, places.partials, places.counters,
                     shared.columns))
      continue;
    for (int c = this_thread(); c < tiles.tile && base + c < tiles.width; c += kThreads)
      finish_cell(call, places, base + c, {shared.columns.of(0, c), shared.columns.of(1, c)});
    __syncthreads();
  }
}

/// Bytes: the sums of cells, where they are folded, and partial sums.
template <typename T>
int64_t workspace_of(const Moments& call, int multiprocessors) {
  const auto& layout = call.layout;
  int64_t words = partials_of_cells(layout.cells, multiprocessors);
  if (layout.inner == 1)
    words = std::max(partials_of(tiles_of_columns<kVectorLength<T>>(layout, multiprocessors)),
                     partials_of(tiles_of_columns<1>(layout, multiprocessors)));
  return (words + (layout.slot_of_cell == nullptr ? 0 : 2 * layout.cells)) *
         static_cast<int64_t>(sizeof(double));
}

template <typename T>
Status launch_as(const Moments& call, const Resources& resources) {
  const auto& layout = call.layout;
  auto* words = static_cast<double*>(resources.workspace);
  Places places;
  if (layout.slot_of_cell != nullptr) {
    places.of_cells = words;
    words += 2 * layout.cells;
  }
  places.partials = words;
  places.counters = resources.counters;
  const bool centers = call.center_from.data != nullptr && call.center != nullptr;
  places.front = call.header.to != nullptr || call.header.center_hash != nullptr || centers;
  if (layout.inner == 1) {
    const bool aligned = aligned_rows(sizeof(T), layout.cells, {call.x, call.residual, call.sum});
    return with_vectors<T>(aligned, [&](auto length) {
      constexpr int V = decltype(length)::value;
      const auto tiles = tiles_of_columns<V>(layout, resources.multiprocessors);
      return launch_kernel(moments_of_columns<T, V>,
                           grid_for(tiles.items(), resources) + places.front,
                           sizeof(ColumnsShared<V>), resources, call, tiles, places);
    });
  }
  const int offset = misalignment(sizeof(T), {call.x, call.residual, call.sum});
  return with_vectors<T>(offset >= 0, [&](auto length) {
    constexpr int V = decltype(length)::value;
    const auto plan =
        plan_cells(layout, runs_of<V>(layout.inner, offset), resources.multiprocessors);
    return launch_kernel(moments_of_cells<T, V>, grid_for(plan.items, resources) + places.front,
                         sizeof(CellShared), resources, call, plan, places);
  });
}

}  // namespace

int64_t moments_workspace(const Moments& call, int multiprocessors) {
  int64_t bytes = 0;
  if (valid(call.layout))
    dispatch(call.dtype, [&](auto element) {
      bytes = workspace_of<decltype(element)>(call, multiprocessors);
      return Status{cudaSuccess};
    });
  return bytes;
}

Status launch(const Moments& call, const Resources& resources) {
  if (!valid(call.layout) || !foldable(call.layout)) return cudaErrorInvalidValue;
  const Status status = dispatch(
      call.dtype, [&](auto element) { return launch_as<decltype(element)>(call, resources); });
  if (status != cudaSuccess || call.layout.slot_of_cell == nullptr) return status;
  FoldSlots fold;
  fold.of_cells = static_cast<const double*>(resources.workspace);
  fold.layout = call.layout;
  fold.shared_out = true;
  fold.of_slots = call.sums;
  return launch(fold, resources);
}

}  // namespace syncnorm::kernels::cuda
