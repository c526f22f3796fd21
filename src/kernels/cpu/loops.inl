// The source of every loop, in the namespace SYNCNORM_CAPABILITY. See loops.h.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <experimental/simd>
#include <limits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "kernels/cpu/loops.h"

#define INLINE __attribute__((always_inline)) inline

namespace syncnorm::kernels::loops::SYNCNORM_CAPABILITY {
namespace {

#include "kernels/cpu/simd.inl"

constexpr int64_t kBlock = 2048;  // values whose lane sums stay in the dtype of computation
constexpr int kUnrolled = 4;      // independent sums, which hide the latency of additions

/// Two sums in lanes, kUnrolled each.
template <typename A>
struct LaneSums {
  Vec<A> first[kUnrolled], second[kUnrolled];

  LaneSums() {
    for (int u = 0; u < kUnrolled; ++u) first[u] = second[u] = Vec<A>(A(0));
  }
  Sums total() const {
    return {double(stdx::reduce((first[0] + first[1]) + (first[2] + first[3]))),
            double(stdx::reduce((second[0] + second[1]) + (second[2] + second[3])))};
  }
};

/// Adds term(i, extent, first, second) for the vectors of [0, n).
template <typename A, typename Term>
INLINE Sums sum_vectors(int64_t n, Term&& term) {
  LaneSums<A> sums;
  int64_t i = 0;
  for (; i + kUnrolled * lanes<A> <= n; i += kUnrolled * lanes<A>)
    for (int u = 0; u < kUnrolled; ++u)
      term(i + u * lanes<A>, Whole(), sums.first[u], sums.second[u]);
  for (; i + lanes<A> <= n; i += lanes<A>) term(i, Whole(), sums.first[0], sums.second[0]);
  if (i < n) term(i, Part{n - i}, sums.first[0], sums.second[0]);
  return sums.total();
}

/// Sums whose squares left the range of the dtype, in double; NaN and infinity come out as such.
template <typename T>
Sums moments_in_double(const T* x, int64_t n, int64_t stride, double center) {
  Sums sums;
  for (int64_t i = 0; i < n; ++i) {
    compute_t<T> values[lanes<compute_t<T>>];
    store(load(x + i * stride, Part{1}), values, Whole());
    const double d = double(values[0]) - center;
    sums.first += d;
    sums.second += d * d;
  }
  return sums;
}

/// Whether a sum of n squares in A lacks digits, since squares fell below the smallest normal
/// number; zero too, which only larger factors can tell from squares of nothing.
template <typename A>
INLINE bool too_small(double sum, int64_t n) {
  return !std::is_same_v<A, double> && sum < 0x1p-100 * double(n);
}

/// Whether squares, or their sum, left the range of A; or are NaN.
template <typename A>
INLINE bool too_large(double sum) {
  return !std::is_same_v<A, double> && !(sum <= double(std::numeric_limits<A>::max()));
}

/// A factor that brings every difference, of which the squares are too small, well into range.
constexpr float kMagnify = 0x1p100f;
constexpr double kReduce = 0x1p-100;

/// A value so near the mean of x that the mean square about it is at most 8 times the variance.
template <typename T>
INLINE compute_t<T> rough_mean(const T* x, int64_t n) {
  using A = compute_t<T>;
  const int64_t some = std::max(n / 8, std::min<int64_t>(n, 2 * lanes<A>));
  const auto sum = sum_vectors<A>(
      some, [&](int64_t i, auto extent, auto& first, auto&) { first += load(x + i, extent); });
  return A(sum.first) / A(some);
}

/// sum(d), sum(d^2) of d = x - near, or of d magnified.
template <bool magnified, typename T>
INLINE Sums moments_about(const T* x, int64_t n, compute_t<T> near) {
  using A = compute_t<T>;
  const Vec<A> about(near);
  return sum_vectors<A>(n, [&](int64_t i, auto extent, auto& first, auto& second) {
    auto d = load(x + i, extent) - about;
    if constexpr (magnified) d *= A(kMagnify);
    if constexpr (std::is_same_v<decltype(extent), Part>)
      stdx::where(!first_lanes<A>(extent), d) = A(0);
    first += d;
    second += d * d;
  });
}

/// The sums of a block about `near`, moved to `center`.
template <typename T>
Sums moments_of_block(const T* x, int64_t n, compute_t<T> near, double center) {
  using A = compute_t<T>;
  auto sums = moments_about<false>(x, n, near);
  if (too_large<A>(sums.second)) return moments_in_double(x, n, 1, center);
  if (too_small<A>(sums.second, n)) {
    sums = moments_about<true>(x, n, near);
    sums.first *= kReduce;
    sums.second *= kReduce * kReduce;
  }
  const double shift = double(near) - center;
  return {sums.first + double(n) * shift,
          sums.second + shift * (2 * sums.first + double(n) * shift)};
}

template <typename T>
Sums moments(const T* x, int64_t n, double center) {
  Sums sums;
  for (; n > 0; x += kBlock, n -= kBlock) {
    const int64_t m = std::min(n, kBlock);
    const auto block = moments_of_block(x, m, rough_mean(x, m), center);
    sums.first += block.first;
    sums.second += block.second;
  }
  return sums;
}

template <typename T>
Sums squares(const T* x, int64_t n) {
  using A = compute_t<T>;
  Sums sums;
  for (; n > 0; x += kBlock, n -= kBlock) {
    const int64_t m = std::min(n, kBlock);
    const auto block = sum_vectors<A>(m, [&](int64_t i, auto extent, auto&, auto& second) {
      const auto v = load(x + i, extent);
      second += v * v;
    });
    sums.second += too_large<A>(block.second) || too_small<A>(block.second, m)
                       ? moments_of_block(x, m, A(0), 0).second
                       : block.second;
  }
  return sums;
}

/// Rows that are read together are as many streams, more than the machine foresees by itself. The
/// address may lie beyond the tensor: a hint never faults.
INLINE void prefetch(const void* address) { __builtin_prefetch(address); }

/// Adds each slot's sums over `rows` rows to first, second [slots]:
/// term(row, i, extent, first, second).
template <int Together, typename A, typename Term>
INLINE void add_rows(int64_t slots, int64_t row, A* first, A* second, Term&& term) {
  for_vectors<A>(slots, [&](int64_t i, auto extent) {
    auto sum = load(first + i, extent), other = load(second + i, extent);
    for (int r = 0; r < Together; ++r) term(row + r, i, extent, sum, other);
    store(sum, first + i, extent);
    store(other, second + i, extent);
  });
}

template <typename A, typename Term>
INLINE void sum_rows(int64_t rows, int64_t slots, A* first, A* second, Term&& term) {
  std::fill_n(first, slots, A(0));
  std::fill_n(second, slots, A(0));
  int64_t row = 0;
  for (; row + kRowsTogether <= rows; row += kRowsTogether)
    add_rows<kRowsTogether>(slots, row, first, second, term);
  for (; row < rows; ++row) add_rows<1>(slots, row, first, second, term);
}

/// Adds the sums of `rows` rows, taken about `near`, to first, second, moved to `center`. Slots
/// whose squares left the range of A are summed anew; `factor` is scratch.
template <typename T>
void add_moments_out_of_range(const T* x, int64_t rows, int64_t slots, const double* center,
                              const compute_t<T>* near, compute_t<T>* sum, compute_t<T>* squared,
                              compute_t<T>* factor, double* first, double* second) {
  using A = compute_t<T>;
  for (int64_t s = 0; s < slots; ++s)
    factor[s] = too_small<A>(double(squared[s]), rows) ? A(kMagnify) : A(1);
  sum_rows(rows, slots, sum, squared, [&](int64_t r, int64_t i, auto extent, auto& a, auto& b) {
    const auto d =
        (load(x + r * slots + i, extent) - load(near + i, extent)) * load(factor + i, extent);
    a += d;
    b += d * d;
  });
  for (int64_t s = 0; s < slots; ++s) {
    Sums sums{double(sum[s]), double(squared[s])};
    if (too_large<A>(sums.second)) {
      sums = moments_in_double(x + s, rows, slots, center[s]);
    } else {
      const double back = factor[s] == A(1) ? 1 : kReduce;
      const double shift = double(near[s]) - center[s];
      sums.first *= back;
      sums.second = sums.second * back * back + shift * (2 * sums.first + double(rows) * shift);
      sums.first += double(rows) * shift;
    }
    first[s] += sums.first;
    second[s] += sums.second;
  }
}

template <typename T>
void moments_rows(const T* x, int64_t rows, int64_t slots, const double* center, double* first,
                  double* second, compute_t<T>* scratch) {
  using A = compute_t<T>;
  A *near = scratch, *sum = scratch + slots, *squared = scratch + 2 * slots;
  for (; rows > 0; rows -= kChunkRows, x += kChunkRows * slots) {
    const int64_t m = std::min(rows, kChunkRows);
    const int64_t some = std::max(m / 8, std::min<int64_t>(m, kRowsTogether));
    sum_rows(some, slots, near, sum, [&](int64_t r, int64_t i, auto extent, auto& a, auto&) {
      const T* at = x + r * slots + i;
      prefetch(at + kRowsTogether * slots);
      a += load(at, extent);
    });
    for (int64_t s = 0; s < slots; ++s) near[s] /= A(some);
    sum_rows(m, slots, sum, squared, [&](int64_t r, int64_t i, auto extent, auto& a, auto& b) {
      const T* at = x + r * slots + i;
      prefetch(at + kRowsTogether * slots);
      const auto d = load(at, extent) - load(near + i, extent);
      a += d;
      b += d * d;
    });
    bool good = true;
    for (int64_t s = 0; s < slots; ++s)
      good &= !too_small<A>(double(squared[s]), m) && !too_large<A>(double(squared[s]));
    if (!good) {
      add_moments_out_of_range(x, m, slots, center, near, sum, squared, scratch + 3 * slots, first,
                               second);
      continue;
    }
    for (int64_t s = 0; s < slots; ++s) {
      const double shift = double(near[s]) - center[s];
      first[s] += double(sum[s]) + double(m) * shift;
      second[s] += double(squared[s]) + shift * (2 * double(sum[s]) + double(m) * shift);
    }
  }
}

// --- forward
// ---------------------------------------------------------------------------------------

template <typename V>
INLINE V rectified(V value) {
  stdx::where(value <= typename V::value_type(0), value) = typename V::value_type(0);
  return value;  // NaN stays
}

/// (x - center)*scale + offset, and what it is with the mean's remainder and no weight.
template <typename V>
INLINE V affine(V x, V center, V scale, V offset) {
  return (x - center) * scale + offset;
}

template <typename T, typename K>
INLINE void apply_vectors(const T* x, const T* residual, int64_t n, const K& k, bool relu, T* y) {
  using A = compute_t<T>;
  const auto map = [&](auto add, auto rectify) {
    for_vectors<A>(n, [&](int64_t i, auto extent) {
      auto v = affine(load(x + i, extent), k.center.at(i, extent), k.scale.at(i, extent),
                      k.offset.at(i, extent));
      if constexpr (decltype(add)::value) v += load(residual + i, extent);
      if constexpr (decltype(rectify)::value) v = rectified(v);
      store(v, y + i, extent);
    });
  };
  if (residual != nullptr) {
    relu ? map(std::true_type(), std::true_type()) : map(std::true_type(), std::false_type());
  } else {
    relu ? map(std::false_type(), std::true_type()) : map(std::false_type(), std::false_type());
  }
}

template <typename A>
Coefficients<Same<A>> same(const Coefficients<A>& k) {
  return {Same<A>(k.center), Same<A>(k.rstd), Same<A>(k.shift), Same<A>(k.scale),
          Same<A>(k.offset), Same<A>(k.a),    Same<A>(k.b),     Same<A>(k.c)};
}

template <typename A>
Coefficients<Each<A>> each(const Coefficients<const A*>& k) {
  return {{k.center}, {k.rstd}, {k.shift}, {k.scale}, {k.offset}, {k.a}, {k.b}, {k.c}};
}

template <typename T>
void apply(const T* x, const T* residual, int64_t n, const Coefficients<compute_t<T>>& k, bool relu,
           T* y) {
  apply_vectors(x, residual, n, same(k), relu, y);
}

template <typename T>
void apply_rows(const T* x, const T* residual, int64_t rows, int64_t slots,
                const Coefficients<const compute_t<T>*>& k, bool relu, T* y) {
  for (int64_t r = 0; r < rows; ++r, x += slots, y += slots) {
    apply_vectors(x, residual, slots, each(k), relu, y);
    if (residual != nullptr) residual += slots;
  }
}

template <typename T>
void apply_columns(const T* x, int64_t n, const Coefficients<compute_t<T>>& coefficients,
                   const compute_t<T>* weight, const compute_t<T>* bias, T* y) {
  using A = compute_t<T>;
  const auto k = same(coefficients);
  const auto map = [&](auto weighted, auto biased) {
    for_vectors<A>(n, [&](int64_t i, auto extent) {
      auto v = affine(load(x + i, extent), k.center.vector, k.rstd.vector, k.shift.vector);
      if constexpr (decltype(weighted)::value) v *= load(weight + i, extent);
      if constexpr (decltype(biased)::value) v += load(bias + i, extent);
      store(v, y + i, extent);
    });
  };
  if (weight == nullptr) return map(std::false_type(), std::false_type());
  bias == nullptr ? map(std::true_type(), std::false_type())
                  : map(std::true_type(), std::true_type());
}

template <typename T>
void add(const T* x, const T* residual, int64_t n, T* sum) {
  for_vectors<compute_t<T>>(n, [&](int64_t i, auto extent) {
    store(load(x + i, extent) + load(residual + i, extent), sum + i, extent);
  });
}

// --- backward
// --------------------------------------------------------------------------------------

/// The gradient of element i that passes the gate.
template <Gate gate, typename T, typename K, typename Extent>
INLINE Vec<compute_t<T>> gated(const T* x, const T* dy, const T* output, const K& k, int64_t i,
                               Extent extent) {
  using A = compute_t<T>;
  auto g = load(dy + i, extent);
  if constexpr (gate == Gate::recompute)
    stdx::where(affine(load(x + i, extent), k.center.at(i, extent), k.scale.at(i, extent),
                       k.offset.at(i, extent)) <= A(0),
                g) = A(0);
  if constexpr (gate == Gate::output) stdx::where(load(output + i, extent) <= A(0), g) = A(0);
  return g;
}

template <Gate gate>
using GateTag = std::integral_constant<Gate, gate>;

template <typename Body>
INLINE auto with_gate(Gate gate, Body&& body) {
  switch (gate) {
    case Gate::recompute:
      return body(GateTag<Gate::recompute>());
    case Gate::output:
      return body(GateTag<Gate::output>());
    default:
      return body(GateTag<Gate::open>());
  }
}

template <typename T>
Sums backward_sums(const T* x, const T* dy, const T* output, int64_t n,
                   const Coefficients<compute_t<T>>& coefficients, Gate gate) {
  using A = compute_t<T>;
  const auto k = same(coefficients);
  return with_gate(gate, [&](auto tag) {
    Sums sums;
    for (int64_t start = 0; start < n; start += kBlock) {
      const auto block = sum_vectors<A>(
          std::min(n - start, kBlock), [&](int64_t at, auto extent, auto& first, auto& second) {
            const int64_t i = start + at;
            const auto g = gated<decltype(tag)::value>(x, dy, output, k, i, extent);
            first += g;
            second +=
                g * affine(load(x + i, extent), k.center.vector, k.rstd.vector, k.shift.vector);
          });
      sums.first += block.first;
      sums.second += block.second;
    }
    return sums;
  });
}

template <typename T>
void backward_sums_rows(const T* x, const T* dy, const T* output, int64_t rows, int64_t slots,
                        const Coefficients<const compute_t<T>*>& coefficients, Gate gate,
                        double* first, double* second, compute_t<T>* scratch) {
  const auto k = each(coefficients);
  with_gate(gate, [&](auto tag) {
    for (int64_t start = 0; start < rows; start += kChunkRows) {
      sum_rows(std::min(rows - start, kChunkRows), slots, scratch, scratch + slots,
               [&](int64_t r, int64_t i, auto extent, auto& a, auto& b) {
                 const int64_t row = (start + r) * slots;
                 prefetch(x + row + i + kRowsTogether * slots);
                 prefetch(dy + row + i + kRowsTogether * slots);
                 const auto* out = output == nullptr ? nullptr : output + row;
                 const auto g = gated<decltype(tag)::value>(x + row, dy + row, out, k, i, extent);
                 a += g;
                 b += g * affine(load(x + row + i, extent), k.center.at(i, extent),
                                 k.rstd.at(i, extent), k.shift.at(i, extent));
               });
      for (int64_t s = 0; s < slots; ++s) {
        first[s] += double(scratch[s]);
        second[s] += double(scratch[slots + s]);
      }
    }
  });
}

/// Lane sums of rows taken together, over columns [0, n).
template <int Together, bool weighted, bool columns, typename T>
INLINE void sum_columns(const T* x, const T* dy, int64_t stride, int64_t n,
                        const Coefficients<compute_t<T>>* coefficients, const compute_t<T>* weight,
                        compute_t<T>* dweight, compute_t<T>* dbias, Sums* sums) {
  using A = compute_t<T>;
  Vec<A> first[Together], second[Together], center[Together], rstd[Together], shift[Together];
  for (int r = 0; r < Together; ++r) {
    first[r] = second[r] = Vec<A>(A(0));
    center[r] = Vec<A>(coefficients[r].center);
    rstd[r] = Vec<A>(coefficients[r].rstd);
    shift[r] = Vec<A>(coefficients[r].shift);
  }
  for_vectors<A>(n, [&](int64_t i, auto extent) {
    Vec<A> w(A(1)), dw(A(0)), db(A(0));
    if constexpr (weighted) w = load(weight + i, extent);
    if constexpr (columns) {
      dw = load(dweight + i, extent);
      db = load(dbias + i, extent);
    }
    for (int r = 0; r < Together; ++r) {
      auto g = load(dy + r * stride + i, extent);
      const auto xhat = affine(load(x + r * stride + i, extent), center[r], rstd[r], shift[r]);
      if constexpr (columns) {
        dw += g * xhat;
        db += g;
      }
      if constexpr (weighted) g *= w;
      first[r] += g;
      second[r] += g * xhat;
    }
    if constexpr (columns) {
      store(dw, dweight + i, extent);
      store(db, dbias + i, extent);
    }
  });
  for (int r = 0; r < Together; ++r) {
    sums[r].first += double(stdx::reduce(first[r]));
    sums[r].second += double(stdx::reduce(second[r]));
  }
}

template <typename T>
void backward_sums_columns(const T* x, const T* dy, int64_t rows, int64_t n, int64_t stride,
                           const Coefficients<compute_t<T>>* k, const compute_t<T>* weight,
                           compute_t<T>* dweight, compute_t<T>* dbias, Sums* sums) {
  const auto run = [&](auto together, int64_t row, int64_t at, int64_t count) {
    const auto sum = [&](auto weighted, auto columns) {
      sum_columns<decltype(together)::value, decltype(weighted)::value, decltype(columns)::value>(
          x + row * stride + at, dy + row * stride + at, stride, count, k + row,
          weight == nullptr ? nullptr : weight + at, dweight == nullptr ? nullptr : dweight + at,
          dbias == nullptr ? nullptr : dbias + at, sums + row);
    };
    if (weight != nullptr) {
      dweight != nullptr ? sum(std::true_type(), std::true_type())
                         : sum(std::true_type(), std::false_type());
    } else {
      dweight != nullptr ? sum(std::false_type(), std::true_type())
                         : sum(std::false_type(), std::false_type());
    }
  };
  std::fill_n(sums, rows, Sums());
  int64_t row = 0;
  for (; row + kRowsTogether <= rows; row += kRowsTogether)
    for (int64_t at = 0; at < n; at += kBlock)
      run(std::integral_constant<int, kRowsTogether>(), row, at, std::min(kBlock, n - at));
  for (; row < rows; ++row)
    for (int64_t at = 0; at < n; at += kBlock)
      run(std::integral_constant<int, 1>(), row, at, std::min(kBlock, n - at));
}

template <typename T, typename K>
INLINE void backward_apply_vectors(const T* x, const T* dy, const T* output, int64_t n, const K& k,
                                   Gate gate, T* dx, T* dresidual) {
  using A = compute_t<T>;
  with_gate(gate, [&](auto tag) {
    for_vectors<A>(n, [&](int64_t i, auto extent) {
      const auto g = gated<decltype(tag)::value>(x, dy, output, k, i, extent);
      if (dresidual != nullptr) store(g, dresidual + i, extent);
      if (dx == nullptr) return;
      const auto scaled = (load(x + i, extent) - k.center.at(i, extent)) * k.rstd.at(i, extent);
      store(k.a.at(i, extent) * g + k.b.at(i, extent) * scaled + k.c.at(i, extent), dx + i, extent);
    });
  });
}

template <typename T>
void backward_apply(const T* x, const T* dy, const T* output, int64_t n,
                    const Coefficients<compute_t<T>>& k, Gate gate, T* dx, T* dresidual) {
  backward_apply_vectors(x, dy, output, n, same(k), gate, dx, dresidual);
}

template <typename T>
void backward_apply_rows(const T* x, const T* dy, const T* output, int64_t rows, int64_t slots,
                         const Coefficients<const compute_t<T>*>& k, Gate gate, T* dx,
                         T* dresidual) {
  const auto row = [&](auto* p, int64_t r) { return p == nullptr ? nullptr : p + r * slots; };
  for (int64_t r = 0; r < rows; ++r)
    backward_apply_vectors(x + r * slots, dy + r * slots, row(output, r), slots, each(k), gate,
                           row(dx, r), row(dresidual, r));
}

template <typename T>
void backward_apply_columns(const T* x, const T* dy, int64_t n,
                            const Coefficients<compute_t<T>>& coefficients,
                            const compute_t<T>* weight, const T* extra, T* dx) {
  using A = compute_t<T>;
  const auto k = same(coefficients);
  const auto map = [&](auto weighted, auto added) {
    for_vectors<A>(n, [&](int64_t i, auto extent) {
      auto g = load(dy + i, extent);
      if constexpr (decltype(weighted)::value) g *= load(weight + i, extent);
      const auto scaled = (load(x + i, extent) - k.center.vector) * k.rstd.vector;
      auto result = k.a.vector * g + k.b.vector * scaled + k.c.vector;
      if constexpr (decltype(added)::value) result += load(extra + i, extent);
      store(result, dx + i, extent);
    });
  };
  if (weight != nullptr) {
    extra != nullptr ? map(std::true_type(), std::true_type())
                     : map(std::true_type(), std::false_type());
  } else {
    extra != nullptr ? map(std::false_type(), std::true_type())
                     : map(std::false_type(), std::false_type());
  }
}

template <typename T>
constexpr Loops<T> table() {
  return {moments<T>,
          squares<T>,
          moments_rows<T>,
          apply<T>,
          apply_rows<T>,
          apply_columns<T>,
          backward_sums<T>,
          backward_sums_rows<T>,
          backward_sums_columns<T>,
          backward_apply<T>,
          backward_apply_rows<T>,
          backward_apply_columns<T>,
          add<T>};
}

}  // namespace

// A constant: code that ran when the library is loaded would run on machines that lack the
// instructions.
extern const Tables tables;
constexpr Tables tables{table<float>(), table<double>(), table<bfloat16>(), table<half>()};

}  // namespace syncnorm::kernels::loops::SYNCNORM_CAPABILITY
