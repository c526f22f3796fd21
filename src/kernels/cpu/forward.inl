// From input to output. Included by loops.inl inside its namespace.

template <typename V>
INLINE V rectified(V value) {
  stdx::where(value <= typename V::value_type(0), value) = typename V::value_type(0);
  return value;  // NaN stays
}

/// One expression for forward and backward, so that both see the same sign.
template <typename V>
INLINE V affine(V x, V center, V scale, V offset) {
  return (x - center) * scale + offset;
}

/// Add, Rectify: constants.
template <typename T, typename K, typename Add, typename Rectify>
INLINE void apply_vectors(const T* x, const T* residual, int64_t rows, int64_t n, const K& k, T* y,
                          Ahead ahead, Add, Rectify) {
  using A = compute_t<T>;
  for_rows<kRowsTogether>(rows, ahead, [&](int64_t row, auto together, Ahead ahead) INLINED {
    for_vectors<A>(n, [&](int64_t i, auto extent) INLINED {
      const auto center = k.center.at(i, extent), scale = k.scale.at(i, extent),
                 offset = k.offset.at(i, extent);
      for (int r = 0; r < together; ++r) {
        const int64_t at = (row + r) * n + i;
        ahead.read(x + at);
        auto v = affine(load(x + at, extent), center, scale, offset);
        if constexpr (Add::value) {
          ahead.read(residual + at);
          v += load(residual + at, extent);
        }
        if constexpr (Rectify::value) v = rectified(v);
        put(v, y + at, extent, ahead);
      }
    });
  });
}

/// Coefficients of one cell.
template <typename A>
INLINE Coefficients<Same<A>> same(const Coefficients<const A*>& k, int64_t cell) {
  return {Same<A>(k.center[cell]), Same<A>(k.rstd[cell]),   Same<A>(k.shift[cell]),
          Same<A>(k.scale[cell]),  Same<A>(k.offset[cell]), Same<A>(k.a[cell]),
          Same<A>(k.b[cell]),      Same<A>(k.c[cell])};
}

template <typename A>
Coefficients<Each<A>> each(const Coefficients<const A*>& k) {
  return {{k.center}, {k.rstd}, {k.shift}, {k.scale}, {k.offset}, {k.a}, {k.b}, {k.c}};
}

template <typename T>
void apply(const T* x, const T* residual, const Runs& runs,
           const Coefficients<const compute_t<T>*>& k, bool relu, T* y, Reach reach) {
  const auto ahead = ahead_of<T>(reach, runs);
  with_flags(residual != nullptr, relu, [&](auto add, auto rectify) {
    each_run(runs, [&](int64_t, int64_t at, int64_t cell) INLINED {
      const T* to_add = decltype(add)::value ? residual + at : nullptr;
      apply_vectors(x + at, to_add, 1, runs.length, same(k, cell), y + at, ahead, add, rectify);
    });
  });
}

template <typename T>
void apply_rows(const T* x, const T* residual, int64_t rows, int64_t slots,
                const Coefficients<const compute_t<T>*>& k, bool relu, T* y, Reach reach) {
  with_flags(residual != nullptr, relu, [&](auto add, auto rectify) {
    apply_vectors(x, residual, rows, slots, each(k), y, ahead_of(reach), add, rectify);
  });
}

template <typename T>
void apply_columns(const T* x, int64_t rows, int64_t n, const Coefficients<compute_t<T>>* k,
                   const compute_t<T>* weight, const compute_t<T>* bias, T* y, Reach reach) {
  using A = compute_t<T>;
  using K = Coefficients<A>;
  const auto all = ahead_of(reach);
  const auto map = [&](auto weighted, auto biased) {
    for_weighted_rows<A>(rows, n, all, [&](int64_t row, auto together, Ahead ahead) INLINED {
      constexpr int kTogether = decltype(together)::value;
      const OfRows<kTogether, A> center(k + row, &K::center), rstd(k + row, &K::rstd),
          shift(k + row, &K::shift);
      for_vectors<A>(n, [&](int64_t i, auto extent) INLINED {
        Vec<A> w, b;
        if constexpr (decltype(weighted)::value) w = load(weight + i, extent);
        if constexpr (decltype(biased)::value) b = load(bias + i, extent);
        for (int r = 0; r < kTogether; ++r) {
          const int64_t at = (row + r) * n + i;
          ahead.read(x + at);
          auto v = affine(load(x + at, extent), center[r], rstd[r], shift[r]);
          if constexpr (decltype(weighted)::value) v *= w;
          if constexpr (decltype(biased)::value) v += b;
          put(v, y + at, extent, ahead);
        }
      });
    });
  };
  with_flags(weight != nullptr, bias != nullptr, map);
}

template <typename T>
void add(const T* x, const T* residual, int64_t n, T* sum, Reach reach) {
  const Ahead ahead = ahead_of(reach);
  for_vectors<compute_t<T>>(n, [&](int64_t i, auto extent) INLINED {
    ahead.read(x + i);
    ahead.read(residual + i);
    ahead.write(sum + i);
    store(load(x + i, extent) + load(residual + i, extent), sum + i, extent);
  });
}
