// Coefficients of cells from their statistics. Included by loops.inl inside its namespace.

template <typename A>
void coefficients(const double* __restrict mean, const double* __restrict rstd,
                  const A* __restrict weight, const A* __restrict bias, int64_t n,
                  const Coefficients<A*>& k) {
  auto* __restrict center = k.center;
  auto* __restrict to_rstd = k.rstd;
  auto* __restrict to_shift = k.shift;
  auto* __restrict scale = k.scale;
  auto* __restrict offset = k.offset;
  with_flags(weight != nullptr, bias != nullptr, [=](auto weighted, auto biased) INLINED {
    for (int64_t c = 0; c < n; ++c) {
      const A about = A(mean[c]);
      const double shift = (double(about) - mean[c]) * rstd[c];
      double w = 1, b = 0;
      if constexpr (decltype(weighted)::value) w = double(weight[c]);
      if constexpr (decltype(biased)::value) b = double(bias[c]);
      center[c] = about;
      to_rstd[c] = A(rstd[c]);
      to_shift[c] = A(shift);
      scale[c] = A(rstd[c] * w);
      offset[c] = A(shift * w + b);
    }
  });
}

template <typename A>
void backward_coefficients(const double* __restrict mean, const double* __restrict rstd,
                           const double* __restrict first, const double* __restrict second,
                           const double* __restrict share, double all, int64_t n,
                           const Coefficients<A*>& k) {
  const auto* __restrict center = k.center;
  const auto* __restrict scale = k.scale;
  auto* __restrict a = k.a;
  auto* __restrict b = k.b;
  auto* __restrict to_c = k.c;
  with_flags(first != nullptr, share != nullptr, [=](auto centered, auto shared) INLINED {
    for (int64_t c = 0; c < n; ++c) {
      double correction = rstd[c] * all;
      if constexpr (decltype(shared)::value) correction *= share[c];
      const double slope = -correction * second[c];
      double level = slope * (double(center[c]) - mean[c]) * rstd[c];
      if constexpr (decltype(centered)::value) level -= correction * first[c];
      a[c] = scale[c];
      b[c] = A(slope);
      to_c[c] = A(level);
    }
  });
}
