#pragma once

#include <algorithm>
#include <vector>

#include "kernels/cpu/lines.h"
#include "kernels/kernels.h"

namespace syncnorm::kernels {

/// A tensor's values in the dtype of computation: its own memory where that will do.
template <typename A>
class Values {
 public:
  explicit Values(const at::Tensor& tensor)
      : held_(of_dtype(tensor)), data_(held_.defined() ? held_.const_data_ptr<A>() : nullptr) {}
  const A* data() const { return data_; }

 private:
  static at::Tensor of_dtype(const at::Tensor& tensor) {
    constexpr auto dtype = c10::CppTypeToScalarType<A>::value;
    if (!tensor.defined() || (tensor.scalar_type() == dtype && tensor.is_contiguous()))
      return tensor;
    return tensor.to(dtype).contiguous();
  }

  at::Tensor held_;
  const A* data_;
};

inline const int64_t* slot_map(const NormLayout& layout) {
  return layout.slot_of_cell.defined() ? layout.slot_of_cell.const_data_ptr<int64_t>() : nullptr;
}

/// Values a slot, at least 1.
class Counts {
 public:
  explicit Counts(const SlotCount& count)
      : all_(std::max(count.all, 1.0)),
        each_(count.each.defined() ? count.each.const_data_ptr<double>() : nullptr) {}
  bool alike() const { return each_ == nullptr; }
  double operator[](int64_t slot) const {
    return each_ == nullptr ? all_ : std::max(each_[slot], 1.0);
  }

 private:
  double all_;
  const double* each_;
};

/// A value for each cell: those given where there is one for each, spread otherwise.
template <typename V>
class OfCells {
 public:
  OfCells() = default;
  explicit OfCells(const V* values) : data_(values) {}
  /// of(cell) for each of `cells`.
  template <typename Of>
  OfCells(int64_t cells, Of&& of) : spread_(cells), data_(spread_.data()) {
    for (int64_t c = 0; c < cells; ++c) spread_[c] = of(c);
  }
  OfCells(OfCells&&) noexcept = default;  // what a vector holds stays where it is
  OfCells& operator=(OfCells&&) noexcept = default;
  const V* data() const { return data_; }

 private:
  std::vector<V> spread_;
  const V* data_ = nullptr;
};

/// The coefficients of every cell, see loops::Coefficients. With a weight by column, scale and
/// offset are without it.
template <typename A>
class CellCoefficients {
 public:
  /// Those of the forward; a, b, c are zero.
  explicit CellCoefficients(const Norm& norm) : CellCoefficients(norm, OfStatistics()) {
    for (const auto row : {kA, kB, kC}) std::fill_n(at(row), cells_, A(0));
  }

  /// All, for the ranks' `sums` of the backward.
  CellCoefficients(const Norm& norm, const at::Tensor& sums, const SlotCount& count)
      : CellCoefficients(norm, OfStatistics()) {
    const auto& layout = norm.layout;
    const auto* of_slots = sums.const_data_ptr<double>();
    const auto first = layout.centered ? of_cells(of_slots) : OfCells<double>();
    const auto second = of_cells(of_slots + (layout.sums() - 1) * layout.slots);
    const Counts counts(count);
    const auto* share = layout.share.defined() ? layout.share.const_data_ptr<double>() : nullptr;
    OfCells<double> shares(share);
    if (!counts.alike())
      shares = OfCells<double>(cells_, [&](int64_t c) {
        return (share == nullptr ? 1 : share[c]) / counts[slots_ == nullptr ? c : slots_[c]];
      });
    loops_.backward_coefficients(mean_.data(), rstd_.data(), first.data(), second.data(),
                                 shares.data(), counts.alike() ? 1 / counts[0] : 1, cells_,
                                 mutable_arrays());
  }

  loops::Coefficients<A> operator[](int64_t cell) const {
    return {at(kCenter)[cell], at(kRstd)[cell], at(kShift)[cell], at(kScale)[cell],
            at(kOffset)[cell], at(kA)[cell],    at(kB)[cell],     at(kC)[cell]};
  }
  loops::Coefficients<const A*> arrays() const {
    return {at(kCenter), at(kRstd), at(kShift), at(kScale), at(kOffset), at(kA), at(kB), at(kC)};
  }

 private:
  enum Row : int64_t { kCenter, kRstd, kShift, kScale, kOffset, kA, kB, kC, kRows };

  struct OfStatistics {};

  /// All but a, b, c.
  CellCoefficients(const Norm& norm, OfStatistics /*tag*/)
      : loops_(loops::of<A>(*loops::capability().tables)),
        cells_(norm.layout.cells.cells),
        slots_(slot_map(norm.layout)),
        mean_(of_cells(norm.statistics.const_data_ptr<double>())),
        rstd_(of_cells(norm.statistics.const_data_ptr<double>() +
                       kernels::kRstd * norm.layout.slots)),
        values_(kRows, cells_) {
    const bool by_column = norm.layout.by_column;
    const Values<A> weights(by_column ? at::Tensor() : norm.weight);
    const Values<A> biases(by_column ? at::Tensor() : norm.bias);
    const auto weight = of_rows(weights.data(), norm.layout.affine_rows);
    const auto bias = of_rows(biases.data(), norm.layout.affine_rows);
    loops_.coefficients(mean_.data(), rstd_.data(), weight.data(), bias.data(), cells_,
                        mutable_arrays());
  }

  OfCells<double> of_cells(const double* of_slots) const {
    if (slots_ == nullptr) return OfCells<double>(of_slots);
    return {cells_, [&](int64_t c) { return of_slots[slots_[c]]; }};
  }
  OfCells<A> of_rows(const A* values, int64_t rows) const {
    if (values == nullptr || rows == cells_) return OfCells<A>(values);
    return {cells_, [&](int64_t c) { return values[c % rows]; }};
  }

  A* at(int64_t row) { return values_.row(row); }
  const A* at(int64_t row) const { return values_.row(row); }
  loops::Coefficients<A*> mutable_arrays() {
    return {at(kCenter), at(kRstd), at(kShift), at(kScale), at(kOffset), at(kA), at(kB), at(kC)};
  }

  const loops::Loops<A>& loops_;
  int64_t cells_;
  const int64_t* slots_;
  OfCells<double> mean_, rstd_;
  Lines<A> values_;
};

/// KernelSet::center, finish, update_running and affine_gradient.
at::Tensor finite_center(const at::Tensor& running_mean);
bool finish_statistics(const at::Tensor& sums, const NormLayout& layout, const at::Tensor& center,
                       const SlotCount& count, const Precision& precision,
                       const at::Tensor& statistics);
void update_running_statistics(const at::Tensor& statistics, double count, double momentum,
                               const at::Tensor& running_mean, const at::Tensor& running_var);
at::Tensor gradient_of_affine(const at::Tensor& of_affine, int64_t row,
                              const at::Tensor& parameter);

}  // namespace syncnorm::kernels
