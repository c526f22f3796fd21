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

/// The sums of n differences from one center as those from another, lower by `shift`.
INLINE Sums moved(Sums sums, double n, double shift) {
  return {sums.first + n * shift, sums.second + shift * (2 * sums.first + n * shift)};
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
  return moved(sums, double(n), double(near) - center);
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
      sums = moved({sums.first * back, sums.second * back * back}, double(rows),
                   double(near[s]) - center[s]);
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
      const auto sums =
          moved({double(sum[s]), double(squared[s])}, double(m), double(near[s]) - center[s]);
      first[s] += sums.first;
      second[s] += sums.second;
    }
  }
}
