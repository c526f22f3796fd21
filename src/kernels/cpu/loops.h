#pragma once

#include <cstdint>

/// The inner loops of the CPU kernels: one source (loops.inl), compiled for several instruction
/// sets and chosen at run time. No torch header: they compile in seconds.
///
/// Loads widen to, and stores round from, the dtype of computation: float for half types. Sums are
/// kept in lanes of that dtype over blocks of a few thousand values and added up in double.
namespace syncnorm::kernels::loops {

/// Bit patterns of the half types, as they lie in tensors.
struct bfloat16 {
  uint16_t bits;
};
struct half {
  uint16_t bits;
};

template <typename T>
struct compute {
  using type = float;
};
template <>
struct compute<double> {
  using type = double;
};
template <typename T>
using compute_t = typename compute<T>::type;

struct Sums {
  double first = 0;
  double second = 0;
};

/// Coefficients of one slot's run, or arrays of them, one value a slot, where slots lie side by
/// side.
///
/// The normalised value is xhat = (x - center)*rstd + shift: center is the part of the mean that
/// the dtype holds, so that subtracting it costs x no digits; the rest of the mean is in shift.
/// Before an activation the output is (x - center)*scale + offset, and
/// dx = a*g + b*((x - center)*rstd) + c for the gradient g that passed the activation.
template <typename V>
struct Coefficients {
  V center, rstd, shift, scale, offset, a, b, c;
};

/// Consecutive runs of `length` values. The first belongs to `cell`; the `cells` cells take turns.
/// Loops take many at once, since starting one costs as much as a hundred values.
struct Runs {
  int64_t count;
  int64_t length;
  int64_t cell;
  int64_t cells;

  Runs one(int64_t run) const { return {1, length, (cell + run) % cells, cells}; }
};

/// Which elements' gradients a ReLU lets through: all; those whose output, computed again, is
/// positive; those whose given output is positive.
enum class Gate : uint8_t { open, recompute, output };

/// Bytes of a cache line. Arrays that loops read over and over begin on one: a vector that lies
/// across two costs two loads.
constexpr int64_t kLine = 64;

/// Values of A to leave between rows of n, so that each begins on a line.
template <typename A>
constexpr int64_t padded(int64_t n) {
  constexpr int64_t each = kLine / sizeof(A);
  return (n + each - 1) / each * each;
}

/// Chunk of rows whose float sums are added to the double ones.
constexpr int64_t kChunkRows = 64;

/// Where a norm's input, output and gradients lie, by the bytes of one of them.
enum class Reach : uint8_t {
  near,  ///< up to kNearBytes: in the near caches
  far,   ///< more: asked for ahead, but for long runs, which a processor foresees
  past,  ///< more than kCachedBytes, float or double in whole lines: likewise, and results go past
         ///< the caches, which would read every line before and lose it before anyone reads it
};
constexpr int64_t kNearBytes = 2 << 20;
constexpr int64_t kCachedBytes = 12 << 20;

template <typename T>
struct Loops {
  using A = compute_t<T>;

  /// sum(x - center), sum((x - center)^2) of every run, to first, second [count]; a center for each
  /// cell. They are taken about the center or, where a block lies far off it, about the block's own
  /// mean, and moved in double.
  void (*moments)(const T* x, const Runs& runs, const double* center, double* first, double* second,
                  Reach reach);
  /// sum(x^2) of every run.
  void (*squares)(const T* x, const Runs& runs, double* sums, Reach reach);
  /// The same as `moments` for slots side by side: [rows, slots] added into first, second [slots].
  /// `scratch`: [4, padded(slots)].
  void (*moments_rows)(const T* x, int64_t rows, int64_t slots, const double* center, double* first,
                       double* second, A* scratch, Reach reach);

  /// y = activation((x - center)*scale + offset + residual); residual may be null.
  void (*apply)(const T* x, const T* residual, const Runs& runs, const Coefficients<const A*>& k,
                bool relu, T* y, Reach reach);
  void (*apply_rows)(const T* x, const T* residual, int64_t rows, int64_t slots,
                     const Coefficients<const A*>& k, bool relu, T* y, Reach reach);
  /// y = xhat*weight + bias by column, of consecutive rows of n; bias, or both, may be null. k: one
  /// for each row.
  void (*apply_columns)(const T* x, int64_t rows, int64_t n, const Coefficients<A>* k,
                        const A* weight, const A* bias, T* y, Reach reach);

  /// sum(g), sum(g*xhat) of every run, to first, second [count], g the gradient that passes `gate`;
  /// `output` for Gate::output.
  void (*backward_sums)(const T* x, const T* dy, const T* output, const Runs& runs,
                        const Coefficients<const A*>& k, Gate gate, double* first, double* second,
                        Reach reach);
  /// The same for slots side by side, added into first, second [slots]; `scratch`: [2,
  /// padded(slots)].
  void (*backward_sums_rows)(const T* x, const T* dy, const T* output, int64_t rows, int64_t slots,
                             const Coefficients<const A*>& k, Gate gate, double* first,
                             double* second, A* scratch, Reach reach);
  /// Of `rows` in [1, kChunkRows], runs of n that begin `stride` apart: sums[r] = sum(g),
  /// sum(g*xhat) with g = dy*weight, and by column dweight[n] = sum(dy*xhat), dbias[n] = sum(dy);
  /// dbias, or both, may be null. k: one for each row.
  void (*backward_sums_columns)(const T* x, const T* dy, int64_t rows, int64_t n, int64_t stride,
                                const Coefficients<A>* k, const A* weight, A* dweight, A* dbias,
                                Sums* sums, Reach reach);

  /// dx = a*g + b*((x - center)*rstd) + c; dresidual = g; either may be null.
  void (*backward_apply)(const T* x, const T* dy, const T* output, const Runs& runs,
                         const Coefficients<const A*>& k, Gate gate, T* dx, T* dresidual,
                         Reach reach);
  void (*backward_apply_rows)(const T* x, const T* dy, const T* output, int64_t rows, int64_t slots,
                              const Coefficients<const A*>& k, Gate gate, T* dx, T* dresidual,
                              Reach reach);
  /// dx = a*dy*weight + b*((x - center)*rstd) + c + extra, of consecutive rows of n; weight and
  /// extra may be null. k: one for each row.
  void (*backward_apply_columns)(const T* x, const T* dy, int64_t rows, int64_t n,
                                 const Coefficients<A>* k, const A* weight, const T* extra, T* dx,
                                 Reach reach);

  /// to = from, or to += from where `add`.
  void (*widen)(const A* from, int64_t n, double* to, bool add);
  /// to = from, rounded.
  void (*narrow)(const double* from, int64_t n, T* to);

  /// center, rstd, shift, scale and offset of n cells; weight, bias or both may be null.
  void (*coefficients)(const double* mean, const double* rstd, const A* weight, const A* bias,
                       int64_t n, const Coefficients<A*>& k);
  /// Then a, b and c: first, second are the sums of the gradient, `all`, times `share`, what one
  /// value counts in the mean. `first`, unless centered, and `share` may be null.
  void (*backward_coefficients)(const double* mean, const double* rstd, const double* first,
                                const double* second, const double* share, double all, int64_t n,
                                const Coefficients<A*>& k);

  /// sum = x + residual, rounded to T.
  void (*add)(const T* x, const T* residual, int64_t n, T* sum, Reach reach);
};

struct Tables {
  Loops<float> of_float;
  Loops<double> of_double;
  Loops<bfloat16> of_bfloat16;
  Loops<half> of_half;
};

template <typename T>
const Loops<T>& of(const Tables& tables);
template <>
inline const Loops<float>& of(const Tables& tables) {
  return tables.of_float;
}
template <>
inline const Loops<double>& of(const Tables& tables) {
  return tables.of_double;
}
template <>
inline const Loops<bfloat16>& of(const Tables& tables) {
  return tables.of_bfloat16;
}
template <>
inline const Loops<half>& of(const Tables& tables) {
  return tables.of_half;
}

/// The widest instruction set that library and machine have, or what SYNCNORM_CPU names.
struct Capability {
  const char* name;
  const Tables* tables;
};
const Capability& capability();

}  // namespace syncnorm::kernels::loops
