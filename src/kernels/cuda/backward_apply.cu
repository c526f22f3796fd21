#include "kernels/cuda/backward.cuh"
#include "kernels/cuda/runs.cuh"

namespace syncnorm::kernels::cuda {
namespace {

/// dx = a*g + b*((x - center)*rstd) + c, g the gradient that passed the gate.
template <typename A>
struct Gradient {
  Outputs<A> outputs;
  A a, b, c;
  __device__ A dx(A g, A x) const {
    return fused(a, g, fused(b, (x - outputs.xhat.center) * outputs.xhat.scale, c));
  }
};

template <typename A>
__device__ inline Gradient<A> gradient_of_cell(const BackwardApply& call, int64_t cell) {
  const auto& layout = call.of.layout;
  const int64_t slot = slot_of(layout, cell);
  const double mean = call.of.statistics[slot];
  const double rstd = call.of.statistics[2 * layout.slots + slot];
  const double correction = rstd * share_of(layout, cell) / divisor_of(call.count, slot);
  const double b = -correction * call.sums[(layout.sums() - 1) * layout.slots + slot];
  const double shift = (static_cast<double>(static_cast<A>(mean)) - mean) * rstd;
  const double c = b * shift - (layout.centered ? correction * call.sums[slot] : 0);
  const double weight =
      layout.by_column ? 1 : value_or(call.of.weight, cell % layout.affine_rows, 1);
  return {outputs_of_cell<A>(call.of, cell), static_cast<A>(rstd * weight), static_cast<A>(b),
          static_cast<A>(c)};
}

/// Writes one round of vectors: of(k, e) are the coefficients of an element.
template <typename T, int V, bool recomputes, typename P, int K, typename Of>
__device__ inline void map(const BackwardApply& call, bool fine, const P (&pieces)[K], Of&& of) {
  using A = compute_t<T>;
  Inputs<T, V, K, recomputes> in(call.of, pieces);
#pragma unroll
  for (int p = 0; p < K; ++p) {
#pragma unroll
    for (int e = 0; e < V; ++e) {
      const auto& k = of(p, e);
      const A g = fine ? in.gradient(call.of, p, e, k.outputs) : not_a_number(A(0));
      in.x[p].values[e] = narrow<T>(k.dx(g, in.x_at(p, e)));
      in.dy[p].values[e] = narrow<T>(g);
    }
    if (call.dx != nullptr) store<V>(in.x[p], static_cast<T*>(call.dx), pieces[p]);
    if (call.dresidual != nullptr) store<V>(in.dy[p], static_cast<T*>(call.dresidual), pieces[p]);
  }
}

/// Whether all is well; the first thread says so.
__device__ inline bool check(const BackwardApply& call) {
  const Verdict verdict = verdict_of(call.check, call.count);
  if (this_block() == 0 && this_thread() == 0) write_verdict(call.check, verdict);
  return verdict == kFine;
}

/// Only the verdict was asked for.
__device__ inline bool writes_nothing(const BackwardApply& call) {
  return call.dx == nullptr && call.dresidual == nullptr;
}

template <typename A>
struct GradientShared {
  Gradient<A> of[kMostRows];
};

template <typename T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks<T, V>)
    backward_of_runs(const __grid_constant__ BackwardApply call,
                     const __grid_constant__ RunPlan plan) {
  using A = compute_t<T>;
  auto& shared = shared_memory<GradientShared<A>>();
  const bool fine = check(call);
  if (writes_nothing(call)) return;
  const int64_t inner = call.of.layout.inner;
  for (int64_t item = this_block(); item < plan.items; item += all_blocks()) {
    const RunItem at(plan, item);
    if (this_thread() < at.runs)
      shared.of[this_thread()] =
          gradient_of_cell<A>(call, (at.first_run + this_thread()) % call.of.layout.cells);
    __syncthreads();
    Walk<V> walk(plan.runs, at.first_run * inner, inner, at.from, at.vectors, this_thread(),
                 kThreads);
    while (walk.more()) {
      Piece pieces[kPairs];
      int64_t run[kPairs];
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        run[p] = walk.more() ? walk.run() : 0;
        pieces[p] = walk.next();
      }
      map<T, V, true>(call, fine, pieces,
                      [&](int p, int) -> const Gradient<A>& { return shared.of[run[p]]; });
    }
    __syncthreads();
  }
}

/// Columns are cells.
template <typename T, int V, bool recomputes>
__global__ void __launch_bounds__(kThreads, kTileBlocks<T, V>)
    backward_of_columns(const __grid_constant__ BackwardApply call,
                        const __grid_constant__ Tiles tiles) {
  using A = compute_t<T>;
  constexpr int K = kTilePairs<V, recomputes>;
  auto& shared = shared_memory<GradientShared<A>>();
  const bool fine = check(call);
  if (writes_nothing(call)) return;
  for (int64_t item = this_block(); item < tiles.items(); item += all_blocks()) {
    const TilePlace<V> place(tiles, item);
    const int64_t cell = place.across * tiles.tile + this_thread();
    if (this_thread() < tiles.tile && cell < tiles.width)
      shared.of[this_thread()] = gradient_of_cell<A>(call, cell);
    __syncthreads();
    if (place.inside) {
      Gradient<A> of[V];
#pragma unroll
      for (int e = 0; e < V; ++e) of[e] = shared.of[place.lane * V + e];
      for (int64_t row = place.row; row < place.end; row += int64_t{K} * place.ys) {
        WholePiece pieces[K];
        place.together(tiles, row, pieces);
        map<T, V, recomputes>(call, fine, pieces,
                              [&](int, int e) -> const Gradient<A>& { return of[e]; });
      }
    }
    __syncthreads();
  }
}

/// Rows are cells, the weight goes by column; the cells that take the same row of the weight form a
/// matrix.
template <typename T, int V>
__global__ void __launch_bounds__(kThreads, kTileBlocks<T, V>)
    backward_by_column(const __grid_constant__ BackwardApply call,
                       const __grid_constant__ Tiles tiles) {
  using A = compute_t<T>;
  auto& shared = shared_memory<GradientShared<A>>();
  const bool fine = check(call);
  if (writes_nothing(call)) return;
  const auto& layout = call.of.layout;
  const int64_t each = tiles.items();
  for (int64_t item = this_block(); item < each * layout.affine_rows; item += all_blocks()) {
    const int64_t affine_row = item / each;
    const TilePlace<V> place(tiles, item - affine_row * each);
    const int64_t base = place.down * tiles.rows_each;
    if (base + this_thread() < place.end)
      shared.of[this_thread()] =
          gradient_of_cell<A>(call, (base + this_thread()) * layout.affine_rows + affine_row);
    __syncthreads();
    if (place.inside) {
      A weight[V];
#pragma unroll
      for (int e = 0; e < V; ++e)
        weight[e] = static_cast<A>(
            value_or(call.of.weight, affine_row * layout.inner + place.column + e, 1));
      for (int64_t row = place.row; row < place.end; row += int64_t{kPairs} * place.ys) {
        WholePiece pieces[kPairs];
        place.together(tiles, row, pieces);
        for (auto& piece : pieces) piece.at += affine_row * layout.inner;
        Inputs<T, V, kPairs> in(call.of, pieces);
        Vector<T, V> extra[kPairs];
        if (call.extra != nullptr)
          load_together<V>(static_cast<const T*>(call.extra), pieces, extra);
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
          const int64_t r = row + int64_t{p} * place.ys;
          const auto k = shared.of[r < place.end ? r - base : 0];
#pragma unroll
          for (int e = 0; e < V; ++e) {
            A dx = k.dx(widen(in.dy[p].values[e]) * weight[e], in.x_at(p, e));
            if (call.extra != nullptr) dx += widen(extra[p].values[e]);
            in.x[p].values[e] = narrow<T>(fine ? dx : not_a_number(A(0)));
          }
          store<V>(in.x[p], static_cast<T*>(call.dx), pieces[p]);
        }
      }
    }
    __syncthreads();
  }
}

template <typename T>
Status launch_as(const BackwardApply& call, const Resources& resources) {
  const auto& of = call.of;
  const auto& layout = of.layout;
  const int64_t wanted = kTiles * std::max(resources.multiprocessors, 1);
  const bool writes = call.dx != nullptr || call.dresidual != nullptr;
  const auto queue = [&](auto kernel, int64_t items, const auto& plan) {
    // One block at least, if only for the verdict.
    const int64_t least = call.check.verdict == nullptr ? 0 : 1;
    return launch_kernel(kernel, std::max(writes ? grid_for(items, resources) : 0, least),
                         sizeof(GradientShared<compute_t<T>>), resources, call, plan);
  };
  const void* output = of.gate == Gate::output ? of.output : nullptr;
  if (layout.by_column || layout.inner == 1) {
    const int64_t width = layout.by_column ? layout.inner : layout.cells;
    const bool aligned =
        aligned_rows(sizeof(T), width, {of.x, of.dy, output, call.extra, call.dx, call.dresidual});
    return with_vectors<T>(aligned, [&](auto length) {
      constexpr int V = decltype(length)::value;
      if (!layout.by_column) {
        const auto tiles = tiles_of_cells<V>(layout, wanted);
        return with_gate(of.gate, [&](auto recomputes) {
          return queue(backward_of_columns<T, V, decltype(recomputes)::value>,
                       tiles.rows == 0 ? 0 : tiles.items(), tiles);
        });
      }
      const auto tiles = tiles_by_column<V>(layout, wanted);
      return queue(backward_by_column<T, V>,
                   tiles.rows == 0 ? 0 : tiles.items() * layout.affine_rows, tiles);
    });
  }
  const int offset = misalignment(sizeof(T), {of.x, of.dy, output, call.dx, call.dresidual});
  return with_vectors<T>(offset >= 0, [&](auto length) {
    constexpr int V = decltype(length)::value;
    const auto plan = plan_runs(layout, runs_of<V>(layout.inner, offset), wanted);
    return queue(backward_of_runs<T, V>, plan.items, plan);
  });
}

}  // namespace

Status launch(const BackwardApply& call, const Resources& resources) {
  const auto& layout = call.of.layout;
  if (!valid(layout) || !valid_backward(call.of) ||
      (layout.by_column ? call.dresidual : call.extra) != nullptr)
    return cudaErrorInvalidValue;
  return dispatch(call.of.dtype,
                  [&](auto element) { return launch_as<decltype(element)>(call, resources); });
}

}  // namespace syncnorm::kernels::cuda
