// Vectors of the widest kind that the instruction set of this compilation has. Included by
// loops.inl inside its namespace.

namespace stdx = std::experimental;

template <typename A>
using Vec = stdx::native_simd<A>;
using Bits = stdx::rebind_simd_t<uint32_t, Vec<float>>;

/// How much of a vector to touch: all of it, or the first `count` lanes.
struct Whole {};
struct Part {
  int64_t count;
};

template <typename A>
constexpr int64_t lanes = static_cast<int64_t>(Vec<A>::size());

template <typename A>
INLINE auto first_lanes(Part part) {
  return Vec<A>([](auto i) { return static_cast<A>(int(i)); }) < static_cast<A>(part.count);
}

INLINE float widen_one(half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  uint32_t bits = magnitude << 13;
  if (magnitude >= 0x7c00u) {
    bits |= 0x7f800000u;  // infinity and NaN
  } else {
    float scaled;
    std::memcpy(&scaled, &bits, sizeof scaled);
    scaled *= 0x1p112f;  // from half's exponent bias to float's; subnormals become normal
    std::memcpy(&bits, &scaled, sizeof bits);
  }
  bits |= sign;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

/// Round to nearest, ties to even.
INLINE half narrow_one(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x47800000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // a multiple of 2^-24: adding 0.5 rounds there
    float shifted;
    std::memcpy(&shifted, &magnitude, sizeof shifted);
    shifted += 0.5f;
    std::memcpy(&bits, &shifted, sizeof bits);
    return {static_cast<uint16_t>(sign | (bits - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

INLINE Vec<float> load(const float* p, Whole) { return Vec<float>(p, stdx::element_aligned); }
INLINE Vec<double> load(const double* p, Whole) { return Vec<double>(p, stdx::element_aligned); }
INLINE Vec<float> load(const bfloat16* p, Whole) {
  Bits bits;
  bits.copy_from(reinterpret_cast<const uint16_t*>(p), stdx::element_aligned);
  return stdx::__proposed::simd_bit_cast<Vec<float>>(bits << 16);
}
INLINE Vec<float> load(const half* p, Whole) {
#if defined(__AVX512F__)
  return Vec<float>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__) && defined(__AVX2__)
  return Vec<float>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  return Vec<float>([&](auto i) { return widen_one(p[int(i)]); });
#endif
}

INLINE void store(Vec<float> v, float* p, Whole) { v.copy_to(p, stdx::element_aligned); }
INLINE void store(Vec<double> v, double* p, Whole) { v.copy_to(p, stdx::element_aligned); }
INLINE void store(Vec<float> v, bfloat16* p, Whole) {
  const Bits bits = stdx::__proposed::simd_bit_cast<Bits>(v);
  Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  stdx::where((bits & 0x7fffffffu) > 0x7f800000u, rounded) = 0x7fc0u;
  rounded.copy_to(reinterpret_cast<uint16_t*>(p), stdx::element_aligned);
}
INLINE void store(Vec<float> v, half* p, Whole) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(static_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(static_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < lanes<float>; ++i) p[i] = narrow_one(v[i]);
#endif
}

/// Lanes beyond the part are zero.
INLINE Vec<float> load(const float* p, Part part) {
  Vec<float> v(0.0F);
  stdx::where(first_lanes<float>(part), v).copy_from(p, stdx::element_aligned);
  return v;
}
INLINE Vec<double> load(const double* p, Part part) {
  Vec<double> v(0.0);
  stdx::where(first_lanes<double>(part), v).copy_from(p, stdx::element_aligned);
  return v;
}
template <typename T>
INLINE Vec<compute_t<T>> load(const T* p, Part part) {
  T values[lanes<compute_t<T>>] = {};
  for (int64_t i = 0; i < part.count; ++i) values[i] = p[i];
  return load(values, Whole());
}

#if defined(__AVX__)  // SSE2's store with a mask goes past the caches
INLINE void store(Vec<float> v, float* p, Part part) {
  stdx::where(first_lanes<float>(part), v).copy_to(p, stdx::element_aligned);
}
INLINE void store(Vec<double> v, double* p, Part part) {
  stdx::where(first_lanes<double>(part), v).copy_to(p, stdx::element_aligned);
}
#endif
template <typename T>
INLINE void store(Vec<compute_t<T>> v, T* p, Part part) {
  T values[lanes<compute_t<T>>];
  store(v, values, Whole());
  for (int64_t i = 0; i < part.count; ++i) p[i] = values[i];
}

/// Calls body(i, how much) for every vector of [0, n).
template <typename A, typename Body>
INLINE void for_vectors(int64_t n, Body&& body) {
  int64_t i = 0;
  for (; i + lanes<A> <= n; i += lanes<A>) body(i, Whole());
  if (i < n) body(i, Part{n - i});
}

/// Bytes ahead at which far data is asked for: reads into the second cache, soon enough for memory
/// to answer; writes just early enough for the line to be this core's.
constexpr uintptr_t kReadAhead = 32 * 1024;
constexpr uintptr_t kWriteAhead = 4 * 1024;

/// Asks for far data ahead of the loops; near data would only be slowed down. A hint never faults,
/// also where it points beyond the tensor.
struct Ahead {
  bool far;
  bool past = false;

  INLINE void read(const void* at) const {
    if (far) __builtin_prefetch(beyond(at, kReadAhead), 0, 2);
  }
  INLINE void write(const void* at) const {
    if (far) __builtin_prefetch(beyond(at, kWriteAhead), 1, 2);
  }

  /// Not by the arithmetic of pointers, which must not leave their array.
  static INLINE const void* beyond(const void* at, uintptr_t bytes) {
    return reinterpret_cast<const void*>(  // NOLINT(performance-no-int-to-ptr): nobody reads there
        reinterpret_cast<uintptr_t>(at) + bytes);
  }
};

INLINE Ahead ahead_of(Reach reach) { return {reach != Reach::near, reach == Reach::past}; }

/// Runs from this many bytes on a processor foresees by itself: asked for as well, they took a
/// tenth longer at 6 MB and a third at 31 MB. Shorter runs, and rows of which several are summed at
/// once or whose weights are read beside them, are faster asked for.
constexpr int64_t kLongRun = 2048;

template <typename T>
INLINE Ahead ahead_of(Reach reach, const Runs& runs) {
  const bool is_long = runs.length * int64_t{sizeof(T)} >= kLongRun;
  return {reach != Reach::near && !is_long, reach == Reach::past};
}

/// Stores a vector to aligned memory past the caches, where there is such a store.
template <typename V, typename T>
INLINE void store_past(V v, T* p) {
  store(v, p, Whole());
}
#if defined(__AVX512F__)
INLINE void store_past(Vec<float> v, float* p) { _mm512_stream_ps(p, static_cast<__m512>(v)); }
INLINE void store_past(Vec<double> v, double* p) { _mm512_stream_pd(p, static_cast<__m512d>(v)); }
#elif defined(__AVX__)
INLINE void store_past(Vec<float> v, float* p) { _mm256_stream_ps(p, static_cast<__m256>(v)); }
INLINE void store_past(Vec<double> v, double* p) { _mm256_stream_pd(p, static_cast<__m256d>(v)); }
#endif

/// Stores a result that nobody reads soon; others may after a fence.
template <typename V, typename T, typename Extent>
INLINE void put(V v, T* p, Extent extent, Ahead ahead) {
  if constexpr (std::is_same_v<Extent, Whole>)
    if (ahead.past && reinterpret_cast<uintptr_t>(p) % sizeof(V) == 0) return store_past(v, p);
  ahead.write(p);
  store(v, p, extent);
}

/// body(far), far a constant, for loops so short that a choice at every vector shows.
template <typename Body>
INLINE auto apart(Ahead ahead, Body&& body) {
  return ahead.far ? body(std::true_type()) : body(std::false_type());
}

/// Calls body with two flags as constants.
template <typename Body>
INLINE void with_flags(bool first, bool second, Body&& body) {
  if (first) {
    second ? body(std::true_type(), std::true_type()) : body(std::true_type(), std::false_type());
  } else {
    second ? body(std::false_type(), std::true_type()) : body(std::false_type(), std::false_type());
  }
}

/// Calls body(run, where its values begin, cell) for every run.
template <typename Body>
INLINE void each_run(const Runs& runs, Body&& body) {
  int64_t cell = runs.cell;
  for (int64_t run = 0; run < runs.count; ++run) {
    body(run, run * runs.length, cell);
    if (++cell == runs.cells) cell = 0;
  }
}

/// Rows whose elements are taken together.
constexpr int kRowsTogether = 4;

/// Calls body(row, how many, ahead) for every row of [0, rows): for `most` together, so that what
/// belongs to columns is loaded once for all of them, but for one of far rows at a time, since
/// memory serves one stream better. What of `ahead` is known here reaches the body as constants.
template <int most, typename Body>
INLINE void for_rows(int64_t rows, Ahead ahead, Body&& body) {
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, most> several;
  int64_t row = 0;
  if (ahead.far) {
    for (; row < rows; ++row) body(row, one, Ahead{true, ahead.past});
  } else if (ahead.past) {
    for (; row < rows; ++row) body(row, one, Ahead{false, true});
  } else {
    for (; row + most <= rows; row += most) body(row, several, Ahead{false});
    for (; row < rows; ++row) body(row, one, Ahead{false});
  }
}

/// The same for rows of n with a weight for each column: two together where a row, its result and
/// the weight, three times kWide, do not fit into the first cache, one where they do.
template <typename A, typename Body>
INLINE void for_weighted_rows(int64_t rows, int64_t n, Ahead ahead, Body&& body) {
  constexpr int64_t kWide = 16 * 1024;
  if (n * static_cast<int64_t>(sizeof(A)) < kWide) {
    for_rows<1>(rows, ahead, body);
  } else {
    for_rows<2>(rows, ahead, body);
  }
}

/// One coefficient of rows taken together, each row's in all lanes.
template <int Together, typename A>
class OfRows {
 public:
  INLINE OfRows(const Coefficients<A>* k, A Coefficients<A>::*coefficient) {
    for (int r = 0; r < Together; ++r) vectors_[r] = Vec<A>(k[r].*coefficient);
  }
  INLINE const Vec<A>& operator[](int r) const { return vectors_[r]; }

 private:
  Vec<A> vectors_[Together];
};

/// A factor or term of every element: one value for all, or one for each.
template <typename A>
struct Same {
  explicit Same(A value) : vector(value) {}
  template <typename Extent>
  INLINE Vec<A> at(int64_t, Extent) const {
    return vector;
  }
  Vec<A> vector;
};
template <typename A>
struct Each {
  template <typename Extent>
  INLINE Vec<A> at(int64_t i, Extent extent) const {
    return load(values + i, extent);
  }
  const A* values;
};
