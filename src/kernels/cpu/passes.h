#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>
#include <vector>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "kernels/cpu/coefficients.h"
#include "kernels/cpu/lines.h"
#include "kernels/cpu/loops.h"
#include "kernels/kernels.h"

/// How the loops are spread over threads, and how what they sum is put together. Everything is cut
/// into the same pieces whatever the number of threads, and pieces are added in order.
namespace syncnorm::kernels::passes {

/// A task's share: enough work to outweigh starting it.
constexpr int64_t kGrain = 32 * 1024;

/// Longest piece of one run or of some rows.
constexpr int64_t kPiece = 64 * 1024;

inline int64_t pieces_of(int64_t n, int64_t piece) { return (n + piece - 1) / piece; }

inline int64_t grain_of_runs(int64_t inner) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(inner, 1));
}

template <typename T>
const T* data(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<const T*>(tensor.const_data_ptr()) : nullptr;
}

template <typename T>
T* mutable_data(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

template <typename T>
T* advance(T* values, int64_t by) {
  return values == nullptr ? nullptr : values + by;
}

/// Calls body(T()) for the element type of `tensor`.
template <typename Body>
void dispatch(const at::Tensor& tensor, Body&& body) {
  switch (tensor.scalar_type()) {
    case at::kFloat:  // NOLINT(bugprone-branch-clone): the types of the branches differ
      return body(float());
    case at::kDouble:
      return body(double());
    case at::kBFloat16:
      return body(loops::bfloat16());
    case at::kHalf:
      return body(loops::half());
    default:
      TORCH_INTERNAL_ASSERT(false, "a norm of ", tensor.scalar_type());
  }
}

template <typename T>
loops::Reach reach_of(const CellLayout& layout) {
  constexpr int64_t size = sizeof(T);
  const int64_t bytes = layout.numel() * size;
  if (bytes <= loops::kNearBytes) return loops::Reach::near;
  // Half types have no store past the caches, and lines that are written half past them and half
  // through them are slower than either.
  const int64_t row = layout.inner == 1 ? layout.cells : layout.inner;
  const bool whole_lines = size >= 4 && row * size % loops::kLine == 0;
  return bytes > loops::kCachedBytes && whole_lines ? loops::Reach::past : loops::Reach::far;
}

/// x + residual to be written to `sum`; or nothing to add.
template <typename T>
struct Addition {
  const T* residual = nullptr;
  T* sum = nullptr;
};

/// Two sums of every cell: [2, cells].
class CellSums {
 public:
  explicit CellSums(int64_t cells) : cells_(cells), values_(2 * cells) {}
  /// Adds up `pieces` of [2, cells], in order.
  CellSums(int64_t cells, std::vector<double> pieces) : cells_(cells), values_(std::move(pieces)) {
    for (size_t p = 2 * cells; p < values_.size(); p += 2 * cells)
      for (int64_t c = 0; c < 2 * cells; ++c) values_[c] += values_[p + c];
    values_.resize(2 * cells);
  }

  int64_t cells() const { return cells_; }
  double* first() { return values_.data(); }
  double* second() { return values_.data() + cells_; }
  const double* first() const { return values_.data(); }
  const double* second() const { return values_.data() + cells_; }
  void set(int64_t cell, loops::Sums sums) {
    first()[cell] = sums.first;
    second()[cell] = sums.second;
  }

 private:
  int64_t cells_;
  std::vector<double> values_;
};

/// The runs [begin, end).
inline loops::Runs runs_of(const CellLayout& layout, int64_t begin, int64_t end) {
  return {end - begin, layout.inner, layout.cells == 0 ? 0 : begin % layout.cells, layout.cells};
}

/// Adds what sum(offset, runs, first, second) finds for every run to its cell, in order; long runs
/// in pieces.
template <typename Sum>
CellSums sum_runs(const CellLayout& layout, Sum&& sum) {
  const int64_t pieces = std::max<int64_t>(1, pieces_of(layout.inner, kPiece));
  const int64_t runs = layout.outer * layout.cells;
  CellSums partial(runs * pieces);
  auto *first = partial.first(), *second = partial.second();
  if (pieces == 1) {
    at::parallel_for(0, runs, grain_of_runs(layout.inner), [&](int64_t begin, int64_t end) {
      sum(begin * layout.inner, runs_of(layout, begin, end), first + begin, second + begin);
    });
    if (layout.outer == 1) return partial;
  } else {
    at::parallel_for(0, runs * pieces, 1, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const int64_t run = p / pieces, start = (p - run * pieces) * kPiece;
        auto one = runs_of(layout, run, run + 1);
        one.length = std::min(kPiece, layout.inner - start);
        sum(run * layout.inner + start, one, first + p, second + p);
      }
    });
  }
  CellSums of_cells(layout.cells);
  int64_t next = 0;
  for (int64_t o = 0; o < layout.outer; ++o)
    for (int64_t c = 0; c < layout.cells; ++c)
      for (int64_t p = 0; p < pieces; ++p, ++next) {
        of_cells.first()[c] += first[next];
        of_cells.second()[c] += second[next];
      }
  return of_cells;
}

/// Adds up sum(first_row, rows, first, second, scratch) over pieces of rows; `scratch` has room for
/// `width` rows of A.
template <typename A, typename Sum>
CellSums sum_rows(const CellLayout& layout, int64_t width, Sum&& sum, A /*tag*/) {
  const int64_t cells = layout.cells;
  const int64_t chunks =
      std::max<int64_t>(1, kPiece / std::max<int64_t>(cells, 1) / loops::kChunkRows);
  const int64_t rows_each = chunks * loops::kChunkRows;
  const int64_t pieces = pieces_of(layout.outer, rows_each);
  std::vector<double> partial(pieces * 2 * cells);
  at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    Lines<A> scratch(width, cells);
    for (int64_t p = begin; p < end; ++p) {
      auto* first = partial.data() + p * 2 * cells;
      sum(p * rows_each, std::min(rows_each, layout.outer - p * rows_each), first, first + cells,
          scratch.row(0));
    }
  });
  return {cells, std::move(partial)};
}

/// Sets slots, double [layout.sums(), slots], to the sums of their cells, times `share` and the
/// `weight` of the cell's row where given.
template <typename A>
void fold(const CellSums& of_cells, const NormLayout& layout, const at::Tensor& share,
          const A* weight, const at::Tensor& of_slots) {
  const int64_t cells = of_cells.cells(), rows = layout.affine_rows;
  auto* first = of_slots.data_ptr<double>();
  auto* second = first + (layout.sums() - 1) * layout.slots;
  const auto* slots = slot_map(layout);
  const auto* counted = share.defined() ? share.const_data_ptr<double>() : nullptr;
  // A rank without cells has slots nevertheless, and an empty map is null.
  if (slots == nullptr && counted == nullptr && cells == layout.slots &&
      (weight == nullptr || rows == cells)) {
    const auto set = [&](const double* from, double* to) {
      if (weight == nullptr) return void(std::copy_n(from, cells, to));
      for (int64_t c = 0; c < cells; ++c) to[c] = static_cast<double>(weight[c]) * from[c];
    };
    if (layout.centered) set(of_cells.first(), first);
    return set(of_cells.second(), second);
  }
  std::fill_n(first, layout.sums() * layout.slots, 0.0);
  int64_t row = 0;
  for (int64_t c = 0; c < cells; ++c, row = row + 1 == rows ? 0 : row + 1) {
    const int64_t slot = slots == nullptr ? c : slots[c];
    double factor = counted == nullptr ? 1 : counted[c];
    if (weight != nullptr) factor *= static_cast<double>(weight[row]);
    if (layout.centered) first[slot] += factor * of_cells.first()[c];
    second[slot] += factor * of_cells.second()[c];
  }
}

/// Sets the rows of bias and weight, double [2, affine_rows], to the sums of their cells.
inline void fold_affine(const CellSums& of_cells, const NormLayout& layout,
                        const at::Tensor& of_affine) {
  const int64_t cells = of_cells.cells(), rows = layout.affine_rows;
  auto* bias = of_affine.data_ptr<double>();
  auto* weight = bias + rows;
  if (rows == cells) {
    std::copy_n(of_cells.first(), cells, bias);
    std::copy_n(of_cells.second(), cells, weight);
    return;
  }
  std::fill_n(bias, 2 * rows, 0.0);
  int64_t row = 0;
  for (int64_t c = 0; c < cells; ++c, row = row + 1 == rows ? 0 : row + 1) {
    bias[row] += of_cells.first()[c];
    weight[row] += of_cells.second()[c];
  }
}

/// Stores past the caches come before whatever tells other threads that this task is done.
inline void publish() {
#if defined(__SSE__)
  _mm_sfence();
#endif
}

/// Calls body(offset, runs) for all runs.
template <typename Body>
void for_runs(const CellLayout& layout, Body&& body) {
  at::parallel_for(0, layout.outer * layout.cells, grain_of_runs(layout.inner),
                   [&](int64_t begin, int64_t end) {
                     body(begin * layout.inner, runs_of(layout, begin, end));
                     publish();
                   });
}

/// For norms by column, whose cells are rows: calls body(offset, rows, k, column) for several rows
/// with one row of the weight, which begins at `column`; k[r] are the coefficients of each, from
/// `of`. Several where all rows share it, else one at a time.
template <typename A, typename Body>
void for_rows_by_column(const NormLayout& layout, const CellCoefficients<A>& of, Body&& body) {
  const int64_t inner = layout.cells.inner;
  const int64_t most = layout.affine_rows == 1 ? loops::kChunkRows : 1;
  at::parallel_for(0, layout.cells.cells, grain_of_runs(inner), [&](int64_t begin, int64_t end) {
    loops::Coefficients<A> k[loops::kChunkRows];
    for (int64_t cell = begin; cell < end; cell += most) {
      const int64_t rows = std::min(most, end - cell);
      for (int64_t r = 0; r < rows; ++r) k[r] = of[cell + r];
      body(cell * inner, rows, k, cell % layout.affine_rows * inner);
    }
    publish();
  });
}

/// Calls body(offset, rows) for pieces of rows.
template <typename Body>
void for_rows(const CellLayout& layout, Body&& body) {
  at::parallel_for(0, layout.outer, grain_of_runs(layout.cells), [&](int64_t begin, int64_t end) {
    body(begin * layout.cells, end - begin);
    publish();
  });
}

}  // namespace syncnorm::kernels::passes
