// Sums of the gradient, and the gradient of the input. Included by loops.inl inside its namespace.

/// The gradient of element i that passes the gate. Asks for far dy and output; x is its caller's.
template <Gate gate, typename T, typename K, typename Extent>
INLINE Vec<compute_t<T>> gated(const T* x, const T* dy, const T* output, const K& k, int64_t i,
                               Extent extent, Ahead ahead) {
  using A = compute_t<T>;
  ahead.read(dy + i);
  auto g = load(dy + i, extent);
  if constexpr (gate == Gate::recompute)
    stdx::where(affine(load(x + i, extent), k.center.at(i, extent), k.scale.at(i, extent),
                       k.offset.at(i, extent)) <= A(0),
                g) = A(0);
  if constexpr (gate == Gate::output) {
    ahead.read(output + i);
    stdx::where(load(output + i, extent) <= A(0), g) = A(0);
  }
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
void backward_sums(const T* x, const T* dy, const T* output, const Runs& runs,
                   const Coefficients<const compute_t<T>*>& coefficients, Gate gate, double* first,
                   double* second, Reach reach) {
  using A = compute_t<T>;
  const auto ahead = ahead_of<T>(reach, runs);
  const auto sum = [&](auto tag) {
    each_run(runs, [&](int64_t run, int64_t at, int64_t cell) INLINED {
      const auto k = same(coefficients, cell);
      Sums sums;
      for (int64_t start = 0; start < runs.length; start += kBlock) {
        const int64_t begin = at + start;
        const auto block = sum_vectors<A>(
            std::min(runs.length - start, kBlock),
            [&](int64_t step, auto extent, auto& of_g, auto& of_product) INLINED {
              const int64_t i = begin + step;
              ahead.read(x + i);
              const auto g = gated<decltype(tag)::value>(x, dy, output, k, i, extent, ahead);
              of_g += g;
              of_product +=
                  g * affine(load(x + i, extent), k.center.vector, k.rstd.vector, k.shift.vector);
            });
        sums.first += block.first;
        sums.second += block.second;
      }
      first[run] = sums.first;
      second[run] = sums.second;
    });
  };
  with_gate(gate, sum);
}

template <typename T>
void backward_sums_rows(const T* x, const T* dy, const T* output, int64_t rows, int64_t slots,
                        const Coefficients<const compute_t<T>*>& coefficients, Gate gate,
                        double* first, double* second, compute_t<T>* scratch, Reach reach) {
  const auto k = each(coefficients);
  auto* const other = scratch + padded<compute_t<T>>(slots);
  const auto sum = [&](auto tag, auto far) {
    for (int64_t start = 0; start < rows; start += kChunkRows) {
      sum_rows(std::min(rows - start, kChunkRows), slots, scratch, other,
               [&](int64_t r, int64_t i, auto extent, auto& a, auto& b) INLINED {
                 const int64_t row = (start + r) * slots;
                 const auto* out = output == nullptr ? nullptr : output + row;
                 const Ahead ahead{far};
                 ahead.read(x + row + i);
                 const auto g =
                     gated<decltype(tag)::value>(x + row, dy + row, out, k, i, extent, ahead);
                 a += g;
                 b += g * affine(load(x + row + i, extent), k.center.at(i, extent),
                                 k.rstd.at(i, extent), k.shift.at(i, extent));
               });
      for (int64_t s = 0; s < slots; ++s) {
        first[s] += double(scratch[s]);
        second[s] += double(other[s]);
      }
    }
  };
  with_gate(gate, [&](auto tag) { apart(ahead_of(reach), [&](auto far) { sum(tag, far); }); });
}

/// Whose gradients are summed by column.
enum class Affine : uint8_t { none, weight, both };

/// Adds to sums[r] those of each of the rows taken together, over columns [0, n), and to dweight
/// and dbias those of each column, which the `first_rows` set.
template <int Together, bool weighted, Affine affines, typename T>
INLINE void add_columns(const T* x, const T* dy, int64_t stride, int64_t n,
                        const Coefficients<compute_t<T>>* coefficients, const compute_t<T>* weight,
                        compute_t<T>* dweight, compute_t<T>* dbias, bool first_rows, Sums* sums,
                        Ahead ahead) {
  using A = compute_t<T>;
  using K = Coefficients<A>;
  const OfRows<Together, A> center(coefficients, &K::center), rstd(coefficients, &K::rstd),
      shift(coefficients, &K::shift);
  Vec<A> first[Together], second[Together];
  for (int r = 0; r < Together; ++r) first[r] = second[r] = Vec<A>(A(0));
  for_vectors<A>(n, [&](int64_t i, auto extent) INLINED {
    Vec<A> w(A(1)), dw(A(0)), db(A(0));
    if constexpr (weighted) w = load(weight + i, extent);
    if (!first_rows) {
      if constexpr (affines != Affine::none) dw = load(dweight + i, extent);
      if constexpr (affines == Affine::both) db = load(dbias + i, extent);
    }
    for (int r = 0; r < Together; ++r) {
      ahead.read(x + r * stride + i);
      ahead.read(dy + r * stride + i);
      auto g = load(dy + r * stride + i, extent);
      const auto xhat = affine(load(x + r * stride + i, extent), center[r], rstd[r], shift[r]);
      if constexpr (affines != Affine::none) dw += g * xhat;
      if constexpr (affines == Affine::both) db += g;
      if constexpr (weighted) g *= w;
      first[r] += g;
      second[r] += g * xhat;
    }
    if constexpr (affines != Affine::none) store(dw, dweight + i, extent);
    if constexpr (affines == Affine::both) store(db, dbias + i, extent);
  });
  for (int r = 0; r < Together; ++r) {
    sums[r].first += double(stdx::reduce(first[r]));
    sums[r].second += double(stdx::reduce(second[r]));
  }
}

template <typename T>
void backward_sums_columns(const T* x, const T* dy, int64_t rows, int64_t n, int64_t stride,
                           const Coefficients<compute_t<T>>* k, const compute_t<T>* weight,
                           compute_t<T>* dweight, compute_t<T>* dbias, Sums* sums, Reach reach) {
  const auto run = [&](auto together, auto affines, int64_t row, int64_t at, int64_t count) {
    const auto sum = [&](auto weighted) {
      add_columns<decltype(together)::value, decltype(weighted)::value, decltype(affines)::value>(
          x + row * stride + at, dy + row * stride + at, stride, count, k + row,
          weight == nullptr ? nullptr : weight + at, dweight == nullptr ? nullptr : dweight + at,
          dbias == nullptr ? nullptr : dbias + at, row == 0, sums + row, ahead_of(reach));
    };
    weight != nullptr ? sum(std::true_type()) : sum(std::false_type());
  };
  const auto run_all = [&](auto affines) {
    int64_t row = 0;
    for (; row + kRowsTogether <= rows; row += kRowsTogether)
      for (int64_t at = 0; at < n; at += kBlock)
        run(std::integral_constant<int, kRowsTogether>(), affines, row, at,
            std::min(kBlock, n - at));
    for (; row < rows; ++row)
      for (int64_t at = 0; at < n; at += kBlock)
        run(std::integral_constant<int, 1>(), affines, row, at, std::min(kBlock, n - at));
  };
  std::fill_n(sums, rows, Sums());
  if (dweight == nullptr) return run_all(std::integral_constant<Affine, Affine::none>());
  dbias == nullptr ? run_all(std::integral_constant<Affine, Affine::weight>())
                   : run_all(std::integral_constant<Affine, Affine::both>());
}

template <typename A>
void widen(const A* from, int64_t n, double* to, bool add) {
  if (add) {
    for (int64_t i = 0; i < n; ++i) to[i] += double(from[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = double(from[i]);
  }
}

template <typename T>
void narrow(const double* from, int64_t n, T* to) {
  using A = compute_t<T>;
  if constexpr (std::is_same_v<T, A>) {
    for (int64_t i = 0; i < n; ++i) to[i] = A(from[i]);
  } else {
    for_vectors<A>(n, [&](int64_t i, auto extent) INLINED {
      A values[lanes<A>] = {};
      for (int64_t l = 0; l < std::min(n - i, lanes<A>); ++l) values[l] = A(from[i + l]);
      store(load(values, Whole()), to + i, extent);
    });
  }
}

/// Input, Residual: constants, whose gradients to write.
template <Gate gate, typename T, typename K, typename Input, typename Residual>
INLINE void backward_apply_vectors(const T* x, const T* dy, const T* output, int64_t rows,
                                   int64_t n, const K& k, T* dx, T* dresidual, Ahead ahead, Input,
                                   Residual) {
  using A = compute_t<T>;
  for_rows<kRowsTogether>(rows, ahead, [&](int64_t row, auto together, Ahead ahead) INLINED {
    for_vectors<A>(n, [&](int64_t i, auto extent) INLINED {
      const auto center = k.center.at(i, extent), rstd = k.rstd.at(i, extent),
                 a = k.a.at(i, extent), b = k.b.at(i, extent), c = k.c.at(i, extent);
      for (int r = 0; r < together; ++r) {
        const int64_t start = (row + r) * n;
        const auto* out = gate == Gate::output ? output + start : nullptr;
        if constexpr (Input::value || gate == Gate::recompute) ahead.read(x + start + i);
        const auto g = gated<gate>(x + start, dy + start, out, k, i, extent, ahead);
        if constexpr (Residual::value) put(g, dresidual + start + i, extent, ahead);
        if constexpr (Input::value) {
          const auto scaled = (load(x + start + i, extent) - center) * rstd;
          put(a * g + b * scaled + c, dx + start + i, extent, ahead);
        }
      }
    });
  });
}

/// Calls body(gate, input, residual) with constants, the last two whose gradients are wanted: one
/// of them at least.
template <typename Body>
INLINE void with_outputs(Gate gate, bool input, bool residual, Body&& body) {
  with_gate(gate, [&](auto tag) {
    if (!residual) return body(tag, std::true_type(), std::false_type());
    input ? body(tag, std::true_type(), std::true_type())
          : body(tag, std::false_type(), std::true_type());
  });
}

template <typename T>
void backward_apply(const T* x, const T* dy, const T* output, const Runs& runs,
                    const Coefficients<const compute_t<T>*>& k, Gate gate, T* dx, T* dresidual,
                    Reach reach) {
  const auto ahead = ahead_of<T>(reach, runs);
  with_outputs(gate, dx != nullptr, dresidual != nullptr, [&](auto tag, auto input, auto residual) {
    constexpr Gate passes = decltype(tag)::value;
    each_run(runs, [&](int64_t, int64_t at, int64_t cell) INLINED {
      const T* out = passes == Gate::output ? output + at : nullptr;
      T* to = decltype(input)::value ? dx + at : nullptr;
      T* to_residual = decltype(residual)::value ? dresidual + at : nullptr;
      backward_apply_vectors<passes>(x + at, dy + at, out, 1, runs.length, same(k, cell), to,
                                     to_residual, ahead, input, residual);
    });
  });
}

template <typename T>
void backward_apply_rows(const T* x, const T* dy, const T* output, int64_t rows, int64_t slots,
                         const Coefficients<const compute_t<T>*>& k, Gate gate, T* dx, T* dresidual,
                         Reach reach) {
  with_outputs(gate, dx != nullptr, dresidual != nullptr, [&](auto tag, auto input, auto residual) {
    backward_apply_vectors<decltype(tag)::value>(x, dy, output, rows, slots, each(k), dx, dresidual,
                                                 ahead_of(reach), input, residual);
  });
}

template <typename T>
void backward_apply_columns(const T* x, const T* dy, int64_t rows, int64_t n,
                            const Coefficients<compute_t<T>>* k, const compute_t<T>* weight,
                            const T* extra, T* dx, Reach reach) {
  using A = compute_t<T>;
  using K = Coefficients<A>;
  const auto all = ahead_of(reach);
  const auto map = [&](auto weighted, auto added) {
    for_weighted_rows<A>(rows, n, all, [&](int64_t row, auto together, Ahead ahead) INLINED {
      constexpr int kTogether = decltype(together)::value;
      const OfRows<kTogether, A> center(k + row, &K::center), rstd(k + row, &K::rstd),
          a(k + row, &K::a), b(k + row, &K::b), c(k + row, &K::c);
      for_vectors<A>(n, [&](int64_t i, auto extent) INLINED {
        Vec<A> w;
        if constexpr (decltype(weighted)::value) w = load(weight + i, extent);
        for (int r = 0; r < kTogether; ++r) {
          const int64_t at = (row + r) * n + i;
          ahead.read(x + at);
          ahead.read(dy + at);
          auto g = load(dy + at, extent);
          if constexpr (decltype(weighted)::value) g *= w;
          const auto scaled = (load(x + at, extent) - center[r]) * rstd[r];
          auto result = a[r] * g + b[r] * scaled + c[r];
          if constexpr (decltype(added)::value) {
            ahead.read(extra + at);
            result += load(extra + at, extent);
          }
          put(result, dx + at, extent, ahead);
        }
      });
    });
  };
  with_flags(weight != nullptr, extra != nullptr, map);
}
