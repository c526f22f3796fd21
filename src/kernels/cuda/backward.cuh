#pragma once

#include "kernels/cuda/statistics.cuh"

/// What both passes of the backward do to an element.
namespace syncnorm::kernels::cuda {

/// Vectors that a thread has on their way at once: as many bytes as forward, since there are two
/// inputs.
constexpr int kPairs = kTogether / 2;
/// The same where a thread keeps coefficients of V columns besides.
template <int V, bool recomputes>
constexpr int kTilePairs = V == 8 && recomputes ? 1 : kPairs;

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

/// x, dy and, where the gate asks for it, the output; `recomputes` where the gate may ask for the
/// output to be computed again, which takes registers.
template <typename T, int V, int K, bool recomputes = true>
struct Inputs {
  using A = compute_t<T>;
  Vector<T, V> x[K], dy[K], output[K];

  template <typename P>
  __device__ Inputs(const Backward& of, const P (&pieces)[K]) {
    load_together<V>(static_cast<const T*>(of.x), pieces, x);
    load_together<V>(static_cast<const T*>(of.dy), pieces, dy);
    if (of.gate == Gate::output) load_together<V>(static_cast<const T*>(of.output), pieces, output);
  }
  __device__ A x_at(int k, int e) const { return widen(x[k].values[e]); }

  /// The gradient that passes the gate.
  __device__ A gradient(const Backward& of, int k, int e, const Outputs<A>& outputs) const {
    if (recomputes && of.gate == Gate::recompute && outputs.output(x_at(k, e)) <= 0) return 0;
    if (of.gate == Gate::output && widen(output[k].values[e]) <= 0) return 0;
    return widen(dy[k].values[e]);
  }
};

/// Calls body(std::bool_constant<recomputes>()).
template <typename Body>
Status with_gate(Gate gate, Body&& body) {
  if (gate == Gate::recompute) return body(std::true_type());
  return body(std::false_type());
}

/// Only these are defined together; host side.
inline bool valid_backward(const Backward& of) {
  if (of.gate == Gate::output && of.output == nullptr && of.x != nullptr) return false;
  return !(of.layout.by_column && of.gate != Gate::open);
}

}  // namespace syncnorm::kernels::cuda
