#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/runs.cuh"
#include "kernels/cuda/statistics.cuh"

namespace syncnorm::kernels::cuda {
namespace {

constexpr int64_t kFrontBlocks = 4;  // for each multiprocessor, at most

/// What the launch knows: the first `front` blocks finish the slots.
struct Front {
  int blocks = 0;
  int32_t* counters = nullptr;
};

/// Statistics of all slots, running statistics and the verdict, by the blocks in front. The last of
/// them to be done says what all have found.
__device__ inline void finish_slots(const Apply& call, const Front& front, int& is_last) {
  enum Found { kLost = 1, kChanged = 2 };
  const auto& finish = call.finish;
  const int64_t slots = finish.sums == nullptr ? 0 : call.layout.slots;
  const Verdict before = verdict_of(finish.check, finish.count);
  const double batches = finish.batches == nullptr ? 0 : static_cast<double>(*finish.batches);
  const double momentum = finish.momentum < 0 ? 1 / (batches + 1) : finish.momentum;
  int found = 0;
  for (int64_t slot = this_block() * kThreads + this_thread(); slot < slots;
       slot += int64_t{front.blocks} * kThreads) {
    auto of = statistics_of(call, slot);
    if (before != kFine) of.mean = of.variance = of.rstd = not_a_number(0.);
    call.statistics[slot] = of.mean;
    call.statistics[slots + slot] = of.variance;
    call.statistics[2 * slots + slot] = of.rstd;
    if (of.lost_digits) found |= kLost;
    const double count = count_of(finish.count, slot);
    if (before != kFine || !(count >= 2)) continue;
    found |= kChanged;
    const auto blend = [&](const MutableValues& running, double latest) {
      if (running.data != nullptr)
        put(running, slot, value_at(running, slot) * (1 - momentum) + latest * momentum);
    };
    blend(finish.running_mean, of.mean);
    blend(finish.running_var, of.variance * (count / (count - 1)));
  }
  if (found != 0) atomicOr(front.counters + 1, found);
  if (!arrives_last(front.counters, front.blocks, is_last) || this_thread() != 0) return;
  found = atomicExch(front.counters + 1, 0);
  if (finish.batches != nullptr && (found & kChanged) != 0) ++*finish.batches;
  write_verdict(finish.check, before == kFine && (found & kLost) != 0 ? kLostDigits : before);
}

/// The coefficients of a cell: with its weight and bias, unless those go by column.
template <typename A>
__device__ inline Affine<A> affine_of_cell(const Apply& call, Verdict verdict, int64_t cell) {
  const auto of = statistics_of(call, slot_of(call.layout, cell));
  const double mean = verdict == kFine ? of.mean : not_a_number(0.);
  if (call.layout.by_column) return affine_of<A>(mean, of.rstd, 1, 0);
  const int64_t row = cell % call.layout.affine_rows;
  return affine_of<A>(mean, of.rstd, value_or(call.weight, row, 1), value_or(call.bias, row, 0));
}

template <typename A>
__device__ inline A rectified(A value) {
  return value <= 0 ? 0 : value;  // NaN stays
}

/// Writes K vectors: value(k, e, x) is the output without residual and ReLU.
template <typename T, int V, bool may_add, typename P, int K, typename Value>
__device__ inline void map(const Apply& call, const P (&pieces)[K], Value&& value) {
  const bool adds = may_add && call.residual != nullptr;
  Vector<T, V> x[K], residual[K];
  load_together<V>(static_cast<const T*>(call.x), pieces, x);
  if (adds) load_together<V>(static_cast<const T*>(call.residual), pieces, residual);
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int e = 0; e < V; ++e) {
      auto y = value(k, e, widen(x[k].values[e]));
      if (adds) y += widen(residual[k].values[e]);
      x[k].values[e] = narrow<T>(call.relu ? rectified(y) : y);
    }
    store<V>(x[k], static_cast<T*>(call.y), pieces[k]);
  }
}

template <typename A>
union ApplyShared {
  Affine<A> of[kMostRows];
  int is_last;
};

template <typename T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks<T, V>)
    apply_to_runs(const __grid_constant__ Apply call, const __grid_constant__ RunPlan plan,
                  const __grid_constant__ Front front) {
  using A = compute_t<T>;
  auto& shared = shared_memory<ApplyShared<A>>();
  if (this_block() < front.blocks) return finish_slots(call, front, shared.is_last);
  const Verdict verdict = verdict_of(call.finish.check, call.finish.count);
  const int64_t inner = call.layout.inner;
  for (int64_t item = this_block() - front.blocks; item < plan.items;
       item += all_blocks() - front.blocks) {
    const RunItem at(plan, item);
    if (this_thread() < at.runs)
      shared.of[this_thread()] =
          affine_of_cell<A>(call, verdict, (at.first_run + this_thread()) % call.layout.cells);
    __syncthreads();
    Walk<V> walk(plan.runs, at.first_run * inner, inner, at.from, at.vectors, this_thread(),
                 kThreads);
    while (walk.more()) {
      Piece pieces[kTogether];
      Affine<A> of[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        of[k] = shared.of[walk.more() ? walk.run() : 0];
        pieces[k] = walk.next();
      }
      map<T, V, true>(call, pieces, [&](int k, int, A x) { return of[k](x); });
    }
    __syncthreads();
  }
}

/// Columns are cells.
template <typename T, int V, bool adds>
__global__ void __launch_bounds__(kThreads, kTileBlocks<T, V>)
    apply_to_columns(const __grid_constant__ Apply call, const __grid_constant__ Tiles tiles,
                     const __grid_constant__ Front front) {
  using A = compute_t<T>;
  constexpr int K = adds && V == 8 ? kTogether / 2 : kTogether;
  auto& shared = shared_memory<ApplyShared<A>>();
  if (this_block() < front.blocks) return finish_slots(call, front, shared.is_last);
  const Verdict verdict = verdict_of(call.finish.check, call.finish.count);
  for (int64_t item = this_block() - front.blocks; item < tiles.items();
       item += all_blocks() - front.blocks) {
    const TilePlace<V> place(tiles, item);
    const int64_t cell = place.across * tiles.tile + this_thread();
    if (this_thread() < tiles.tile && cell < tiles.width)
      shared.of[this_thread()] = affine_of_cell<A>(call, verdict, cell);
    __syncthreads();
    if (place.inside) {
      Affine<A> of[V];
#pragma unroll
      for (int e = 0; e < V; ++e) of[e] = shared.of[place.lane * V + e];
      for (int64_t row = place.row; row < place.end; row += int64_t{K} * place.ys) {
        WholePiece pieces[K];
        place.together(tiles, row, pieces);
        map<T, V, adds>(call, pieces, [&](int, int e, A x) { return of[e](x); });
      }
    }
    __syncthreads();
  }
}

/// Rows are cells, weight and bias go by column; the cells that take the same row of the weight
/// form a matrix.
template <typename T, int V>
__global__ void __launch_bounds__(kThreads, kTileBlocks<T, V>)
    apply_by_column(const __grid_constant__ Apply call, const __grid_constant__ Tiles tiles,
                    const __grid_constant__ Front front) {
  using A = compute_t<T>;
  auto& shared = shared_memory<ApplyShared<A>>();
  if (this_block() < front.blocks) return finish_slots(call, front, shared.is_last);
  const Verdict verdict = verdict_of(call.finish.check, call.finish.count);
  const auto& layout = call.layout;
  const int64_t each = tiles.items();
  for (int64_t item = this_block() - front.blocks; item < each * layout.affine_rows;
       item += all_blocks() - front.blocks) {
    const int64_t affine_row = item / each;
    const TilePlace<V> place(tiles, item - affine_row * each);
    const int64_t base = place.down * tiles.rows_each;
    for (int64_t r = this_thread(); r < tiles.rows_each && base + r < tiles.rows; r += kThreads)
      shared.of[r] = affine_of_cell<A>(call, verdict, (base + r) * layout.affine_rows + affine_row);
    __syncthreads();
    if (place.inside) {
      A weight[V], bias[V];
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const int64_t at = affine_row * layout.inner + place.column + e;
        weight[e] = static_cast<A>(value_or(call.weight, at, 1));
        bias[e] = static_cast<A>(value_or(call.bias, at, 0));
      }
      for (int64_t row = place.row; row < place.end; row += int64_t{kTogether} * place.ys) {
        WholePiece pieces[kTogether];
        place.together(tiles, row, pieces);
        for (auto& piece : pieces) piece.at += affine_row * layout.inner;
        map<T, V, false>(call, pieces, [&](int k, int e, A x) {
          const int64_t r = row + int64_t{k} * place.ys;
          const auto& of = shared.of[r < place.end ? r - base : 0];
          return fused(of(x), weight[e], bias[e]);
        });
      }
    }
    __syncthreads();
  }
}

template <typename T>
Status launch_as(const Apply& call, const Resources& resources) {
  using A = compute_t<T>;
  const auto& layout = call.layout;
  const int64_t processors = std::max(resources.multiprocessors, 1);
  const int64_t wanted = kTiles * processors;
  Front front;
  front.counters = resources.counters;
  if (call.finish.sums != nullptr || call.finish.check.verdict != nullptr)
    front.blocks = static_cast<int>(
        std::clamp<int64_t>(ceil_div(layout.slots, kThreads), 1, kFrontBlocks * processors));
  const auto queue = [&](auto kernel, int64_t items, const auto& plan) {
    if (call.y == nullptr) items = 0;
    return launch_kernel(kernel, front.blocks + grid_for(items, resources), sizeof(ApplyShared<A>),
                         resources, call, plan, front);
  };
  if (layout.by_column || layout.inner == 1) {
    const int64_t width = layout.by_column ? layout.inner : layout.cells;
    return with_vectors<T>(
        aligned_rows(sizeof(T), width, {call.x, call.residual, call.y}), [&](auto length) {
          constexpr int V = decltype(length)::value;
          if (!layout.by_column) {
            const auto tiles = tiles_of_cells<V>(layout, wanted);
            const int64_t items = tiles.rows == 0 ? 0 : tiles.items();
            return call.residual != nullptr ? queue(apply_to_columns<T, V, true>, items, tiles)
                                            : queue(apply_to_columns<T, V, false>, items, tiles);
          }
          const auto tiles = tiles_by_column<V>(layout, wanted);
          return queue(apply_by_column<T, V>,
                       tiles.rows == 0 ? 0 : tiles.items() * layout.affine_rows, tiles);
        });
  }
  const int offset = misalignment(sizeof(T), {call.x, call.residual, call.y});
  return with_vectors<T>(offset >= 0, [&](auto length) {
    constexpr int V = decltype(length)::value;
    const auto plan = plan_runs(layout, runs_of<V>(layout.inner, offset), wanted);
    return queue(apply_to_runs<T, V>, plan.items, plan);
  });
}

}  // namespace

Status launch(const Apply& call, const Resources& resources) {
  if (!valid(call.layout) || (call.layout.by_column && (call.residual != nullptr || call.relu)))
    return cudaErrorInvalidValue;
  return dispatch(call.dtype,
                  [&](auto element) { return launch_as<decltype(element)>(call, resources); });
}

}  // namespace syncnorm::kernels::cuda
