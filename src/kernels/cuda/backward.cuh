#pragma once

#include "kernels/cuda/statistics.cuh"

/// What both passes of the backward do to an element.
namespace syncnorm::kernels::cuda {

/// Vectors that a thread has on their way at once: as many bytes as forward, since there are two
/// inputs.
constexpr int kPairs = kTogether / 2;

/// The normalised value, and the output before the activation.
template <typename A>
struct Outputs {
  Affine<A> xhat;
  A scale, offset;
  __device__ A output(A x) const { return Affine<A>{xhat.center, scale, offset}(x); }
};

template <typename A>
__device__ inline Outputs<A> outputs_of_cell(const Backward& of, int64_t cell) {
  const int64_t slot = slot_of(of.layout, cell), slots = of.layout.slots;
  const double mean = of.statistics[slot], rstd = of.statistics[2 * slots + slot];
  const auto xhat = affine_of<A>(mean, rstd, 1, 0);
  if (of.layout.by_column || of.gate != Gate::recompute) return {xhat, 0, 0};
  const int64_t row = cell % of.layout.affine_rows;
  const auto output =
      affine_of<A>(mean, rstd, value_or(of.weight, row, 1), value_or(of.bias, row, 0));
  return {xhat, output.scale, output.offset};
}

/// The gradient that passes the gate.
template <typename A>
__device__ inline A gated(Gate gate, A gradient, const Outputs<A>& k, A x, A output) {
  if (gate == Gate::recompute && k.output(x) <= 0) return 0;
  if (gate == Gate::output && output <= 0) return 0;
  return gradient;
}

/// x, dy and, where the gate asks for it, the output.
template <typename T, int V, int K>
struct Inputs {
  Vector<T, V> x[K], dy[K], output[K];

  __device__ Inputs(const Backward& of, const Piece (&pieces)[K]) {
    load_together<V>(static_cast<const T*>(of.x), pieces, x);
    load_together<V>(static_cast<const T*>(of.dy), pieces, dy);
    if (of.gate == Gate::output)
      load_together<V>(static_cast<const T*>(of.output), pieces, output);
  }
  __device__ compute_t<T> gradient(const Backward& of, int k, int e,
                                   const Outputs<compute_t<T>>& outputs) const {
    using A = compute_t<T>;
    const A out = of.gate == Gate::output ? widen(output[k].values[e]) : 1;
    return gated<A>(of.gate, widen(dy[k].values[e]), outputs, widen(x[k].values[e]), out);
  }
};

/// Only these are defined together; host side.
inline bool valid_backward(const Backward& of) {
  if (of.gate == Gate::output && of.output == nullptr && of.x != nullptr) return false;
  return !(of.layout.by_column && of.gate != Gate::open);
}

}  // namespace syncnorm::kernels::cuda
