#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>

#include "kernels/cpu/lines.h"
#include "kernels/cpu/passes.h"

/// Sums by column, of norms whose weight has an element for each.
namespace syncnorm::kernels::passes {

/// Where pieces of rows sum by column: double [2, width] each, of bias and weight. The first sums
/// where the total goes. Nothing is zeroed: every piece sets before it adds.
class ColumnSums {
 public:
  /// `total`: undefined where nobody wants it. Its bias is zero unless `of_bias`.
  ColumnSums(const at::Tensor& total, int64_t pieces, int64_t width, bool of_bias)
      : total_(mutable_data<double>(total)),
        others_(wanted() && pieces > 1 ? new double[(pieces - 1) * 2 * width] : nullptr),
        pieces_(pieces),
        width_(width),
        of_bias_(of_bias) {}

  bool wanted() const { return total_ != nullptr; }

  /// Sets, or adds to, columns [at, at + inner) of a piece.
  template <typename T, typename A>
  void take(const loops::Loops<T>& loops, int64_t piece, int64_t at, int64_t inner, bool add,
            const A* dweight, const A* dbias) {
    if (!wanted()) return;
    auto* const to = piece_at(piece) + at;
    if (of_bias_) loops.widen(dbias, inner, to, add);
    loops.widen(dweight, inner, to + width_, add);
  }

  void add_up(const loops::Loops<double>& loops) {
    if (!wanted()) return;
    if (pieces_ == 0) std::fill_n(total_, 2 * width_, 0.0);
    if (!of_bias_) std::fill_n(total_, width_, 0.0);
    const int64_t skipped = of_bias_ ? 0 : width_;
    for (int64_t p = 1; p < pieces_; ++p)
      loops.widen(piece_at(p) + skipped, 2 * width_ - skipped, total_ + skipped, true);
  }

 private:
  double* piece_at(int64_t p) { return p == 0 ? total_ : others_.get() + (p - 1) * 2 * width_; }

  double* total_;
  std::unique_ptr<double[]> others_;
  int64_t pieces_, width_;
  bool of_bias_;
};

/// Sums of every cell, and into `of_affine` [2, rows, inner], if defined, those of every column, of
/// the bias zero unless `of_bias`: pieces of cells add up columns of their own.
template <typename T, typename CoefficientsOf>
CellSums sum_columns(const T* x, const T* dy, const NormLayout& layout,
                     const loops::compute_t<T>* weight, CoefficientsOf&& coefficients, bool of_bias,
                     const at::Tensor& of_affine) {
  using A = loops::compute_t<T>;
  constexpr int64_t kMostPieces = 64;  // bounds the memory of the columns' partial sums
  const auto& tables = *loops::capability().tables;
  const auto& loops = loops::of<T>(tables);
  const int64_t inner = layout.cells.inner, rows = layout.affine_rows, width = rows * inner;
  const int64_t repeats = rows == 0 ? 0 : layout.cells.cells / rows;
  const int64_t least = std::max(kPiece / std::max<int64_t>(width, 1), repeats / kMostPieces);
  const int64_t each =
      pieces_of(std::max<int64_t>(least, 1), loops::kChunkRows) * loops::kChunkRows;
  const int64_t pieces = pieces_of(repeats, each);
  const auto reach = reach_of<T>(layout.cells);
  CellSums of_cells(layout.cells.cells);
  ColumnSums of_columns(of_affine, pieces, width, of_bias);
  at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    Lines<A> scratch(of_columns.wanted() ? 2 : 0, inner);
    auto* const dweight = of_columns.wanted() ? scratch.row(0) : nullptr;
    auto* const dbias = of_columns.wanted() && of_bias ? scratch.row(1) : nullptr;
    const auto sum_chunk = [&](int64_t piece, int64_t start, int64_t count, int64_t row) {
      loops::Coefficients<A> k[loops::kChunkRows];
      loops::Sums sums[loops::kChunkRows];
      for (int64_t r = 0; r < count; ++r) k[r] = coefficients((start + r) * rows + row);
      const int64_t at = (start * rows + row) * inner;
      loops.backward_sums_columns(x + at, dy + at, count, inner, width, k,
                                  advance(weight, row * inner), dweight, dbias, sums, reach);
      for (int64_t r = 0; r < count; ++r) of_cells.set((start + r) * rows + row, sums[r]);
      of_columns.take(loops, piece, row * inner, inner, start > piece * each, dweight, dbias);
    };
    for (int64_t p = begin; p < end; ++p)
      for (int64_t start = p * each; start < std::min(repeats, (p + 1) * each);
           start += loops::kChunkRows)
        for (int64_t row = 0; row < rows; ++row)
          sum_chunk(p, start, std::min(loops::kChunkRows, repeats - start), row);
  });
  of_columns.add_up(loops::of<double>(tables));
  return of_cells;
}

}  // namespace syncnorm::kernels::passes
