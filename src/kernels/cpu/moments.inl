// Sums of values and squares, of runs and of rows. Included by loops.inl inside its namespace.

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

/// sum(d), sum(d^2) of d = x - near, or of d magnified.
template <bool magnified, typename T>
INLINE Sums moments_about(const T* x, int64_t n, compute_t<T> near, Ahead ahead) {
  using A = compute_t<T>;
  const Vec<A> about(near);
  return apart(ahead, [&](auto far) INLINED {
    return sum_vectors<A>(n, [&](int64_t i, auto extent, auto& first, auto& second) INLINED {
      Ahead{far}.read(x + i);
      auto d = load(x + i, extent) - about;
      if constexpr (magnified) d *= A(kMagnify);
      if constexpr (std::is_same_v<decltype(extent), Part>)
        stdx::where(!first_lanes<A>(extent), d) = A(0);
      first += d;
      second += d * d;
    });
  });
}

/// The sums of n differences from one center as those from another, lower by `shift`.
INLINE Sums moved(Sums sums, double n, double shift) {
  return {sums.first + n * shift, sums.second + shift * (2 * sums.first + n * shift)};
}

/// Whether the mean of n differences is so far from zero that the mean of their squares is more
/// than 8 times their variance: then the sums about that mean have digits more.
template <typename V, typename N>
INLINE auto far_off(V sum, V squared, N n) {
  return sum * sum > V(0.875F) * squared * n;
}

/// Whether the sums of a block about some value lack digits or left the range of A.
template <typename A>
INLINE bool flawed(Sums sums, int64_t n) {
  return far_off(sums.first, sums.second, double(n)) || too_large<A>(sums.second) ||
         too_small<A>(sums.second, n);
}

/// The flawed `sums` of a block about `near`, taken better, and moved to `center`. A block that
/// lies far off moves `near` to where its own mean is, also for those that follow.
template <typename T>
OUTLINE Sums mended(Sums sums, const T* x, int64_t n, compute_t<T>* near, double center) {
  using A = compute_t<T>;
  if (far_off(sums.first, sums.second, double(n)) && !too_large<A>(sums.second)) {
    *near += A(sums.first / double(n));
    sums = moments_about<false>(x, n, *near, {false});
  }
  if (too_large<A>(sums.second)) return moments_in_double(x, n, 1, center);
  if (too_small<A>(sums.second, n)) {
    sums = moments_about<true>(x, n, *near, {false});
    sums.first *= kReduce;
    sums.second *= kReduce * kReduce;
  }
  return moved(sums, double(n), double(*near) - center);
}

template <typename T>
void moments(const T* x, const Runs& runs, const double* center, double* first, double* second,
             Reach reach) {
  using A = compute_t<T>;
  const auto ahead = ahead_of<T>(reach, runs);
  each_run(runs, [&](int64_t run, int64_t at, int64_t cell) INLINED {
    Sums sums;
    auto near = A(center[cell]);
    for (int64_t start = 0; start < runs.length; start += kBlock) {
      const T* from = x + at + start;
      const int64_t n = std::min(runs.length - start, kBlock);
      auto block = moments_about<false>(from, n, near, ahead);
      block = flawed<A>(block, n) ? mended(block, from, n, &near, center[cell])
                                  : moved(block, double(n), double(near) - center[cell]);
      sums.first += block.first;
      sums.second += block.second;
    }
    first[run] = sums.first;
    second[run] = sums.second;
  });
}

template <typename T>
void squares(const T* x, const Runs& runs, double* sums, Reach reach) {
  using A = compute_t<T>;
  const auto ahead = ahead_of<T>(reach, runs);
  const auto of_block = [&](const T* from, int64_t n) INLINED {
    return apart(ahead, [&](auto far) INLINED {
      return sum_vectors<A>(n, [&](int64_t i, auto extent, auto&, auto& second) INLINED {
        Ahead{far}.read(from + i);
        const auto v = load(from + i, extent);
        second += v * v;
      });
    });
  };
  each_run(runs, [&](int64_t run, int64_t at, int64_t) INLINED {
    double sum = 0;
    for (int64_t start = 0; start < runs.length; start += kBlock) {
      const T* from = x + at + start;
      const int64_t n = std::min(runs.length - start, kBlock);
      double block = of_block(from, n).second;
      if (too_large<A>(block) || too_small<A>(block, n)) {
        A about = 0;
        block = mended(moments_about<false>(from, n, about, {false}), from, n, &about, 0).second;
      }
      sum += block;
    }
    sums[run] = sum;
  });
}

/// Rows whose values are added to the sums of slots before those are stored.
constexpr int kRowsSummed = 8;

/// Adds each slot's sums over rows [row, row + Together) to first, second [slots]:
/// term(row, i, extent, first, second).
template <int Together, typename A, typename Term>
INLINE void add_rows(int64_t slots, int64_t row, A* first, A* second, Term&& term) {
  for_vectors<A>(slots, [&](int64_t i, auto extent) INLINED {
    auto sum = load(first + i, extent), other = load(second + i, extent);
    // Unrolled further, the rows' addresses fill the registers.
#pragma GCC unroll 2
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
  for (; row + kRowsSummed <= rows; row += kRowsSummed)
    add_rows<kRowsSummed>(slots, row, first, second, term);
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
  sum_rows(
      rows, slots, sum, squared, [&](int64_t r, int64_t i, auto extent, auto& a, auto& b) INLINED {
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
      sums = moved({sums.first * back, sums.second * back * back}, double(rows),
                   double(near[s]) - center[s]);
    }
    first[s] += sums.first;
    second[s] += sums.second;
  }
}

/// What is wrong with sums of rows, of any slot.
struct Flaws {
  bool far_off = false;
  bool out_of_range = false;
};
template <typename A>
Flaws flaws(int64_t rows, int64_t slots, const A* sum, const A* squared) {
  const Vec<A> n = A(rows), smallest = std::is_same_v<A, double> ? A(-1) : A(0x1p-100) * A(rows),
               largest = std::numeric_limits<A>::max();
  typename Vec<A>::mask_type far(false), out(false);
  for_vectors<A>(slots, [&](int64_t i, auto extent) INLINED {
    const auto first = load(sum + i, extent);
    auto second = load(squared + i, extent);
    if constexpr (std::is_same_v<decltype(extent), Part>)
      stdx::where(!first_lanes<A>(extent), second) = A(1);
    far = far || far_off(first, second, n);
    out = out || second < smallest || !(second <= largest);
  });
  return {stdx::any_of(far), !std::is_same_v<A, double> && stdx::any_of(out)};
}

template <typename T>
void moments_rows(const T* x, int64_t rows, int64_t slots, const double* center, double* first,
                  double* second, compute_t<T>* scratch, Reach reach) {
  using A = compute_t<T>;
  const Ahead ahead = ahead_of(reach);
  const int64_t stride = padded<A>(slots);
  A *near = scratch, *sum = near + stride, *squared = sum + stride, *factor = squared + stride;
  for (int64_t s = 0; s < slots; ++s) near[s] = A(center[s]);
  for (; rows > 0; rows -= kChunkRows, x += kChunkRows * slots) {
    const int64_t m = std::min(rows, kChunkRows);
    const auto sum_about_near = [&] {
      sum_rows(m, slots, sum, squared,
               [&](int64_t r, int64_t i, auto extent, auto& a, auto& b) INLINED {
                 const T* at = x + r * slots + i;
                 ahead.read(at);
                 const auto d = load(at, extent) - load(near + i, extent);
                 a += d;
                 b += d * d;
               });
    };
    sum_about_near();
    auto found = flaws(m, slots, sum, squared);
    if (found.far_off) {
      for (int64_t s = 0; s < slots; ++s)
        if (far_off(sum[s], squared[s], A(m)) && !too_large<A>(double(squared[s])))
          near[s] += sum[s] / A(m);
      sum_about_near();
      found = flaws(m, slots, sum, squared);
    }
    if (found.out_of_range) {
      add_moments_out_of_range(x, m, slots, center, near, sum, squared, factor, first, second);
      continue;
    }
    for (int64_t s = 0; s < slots; ++s) {
      const auto sums =
          moved({double(sum[s]), double(squared[s])}, double(m), double(near[s]) - center[s]);
      first[s] += sums.first;
      second[s] += sums.second;
    }
  }
}
