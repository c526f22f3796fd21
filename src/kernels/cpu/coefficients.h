#pragma once

#include <algorithm>

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
  double operator[](int64_t slot) const {
    return each_ == nullptr ? all_ : std::max(each_[slot], 1.0);
  }

 private:
  double all_;
  const double* each_;
};

/// The coefficients of every cell, see loops::Coefficients. With a weight by column, scale and
/// offset are without it.
template <typename A>
class CellCoefficients {
 public:
  /// Those of the forward; a, b, c are zero.
  explicit CellCoefficients(const Norm& norm) : values_(kRows, norm.layout.cells.cells) {
    fill(norm, [&](int64_t cell, int64_t, double, double, double) {
      at(kA)[cell] = at(kB)[cell] = at(kC)[cell] = 0;
    });
  }

  /// All, for the ranks' `sums` of the backward.
  CellCoefficients(const Norm& norm, const at::Tensor& sums, const SlotCount& count)
      : values_(kRows, norm.layout.cells.cells) {
    const auto& layout = norm.layout;
    const auto* first = sums.const_data_ptr<double>();
    const auto* second = first + (layout.sums() - 1) * layout.slots;
    const auto* share = layout.share.defined() ? layout.share.const_data_ptr<double>() : nullptr;
    const Counts counts(count);
    fill(norm, [&](int64_t cell, int64_t slot, double rstd, double shift, double scale) {
      const double correction = (share == nullptr ? rstd : rstd * share[cell]) / counts[slot];
      const double b = -correction * second[slot];
      at(kA)[cell] = static_cast<A>(scale);
      at(kB)[cell] = static_cast<A>(b);
      at(kC)[cell] = static_cast<A>(b * shift - (layout.centered ? correction * first[slot] : 0));
    });
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

  A* at(int64_t row) { return values_.row(row); }
  const A* at(int64_t row) const { return values_.row(row); }

  template <typename More>
  void fill(const Norm& norm, More&& more) {
    const auto& layout = norm.layout;
    const auto* mean = norm.statistics.const_data_ptr<double>();
    const auto* rstd = mean + kernels::kRstd * layout.slots;
    const auto* slots = slot_map(layout);
    const Values<A> weights(layout.by_column ? at::Tensor() : norm.weight);
    const Values<A> biases(layout.by_column ? at::Tensor() : norm.bias);
    const A *weight = weights.data(), *bias = biases.data();
    int64_t row = 0;
    for (int64_t cell = 0; cell < layout.cells.cells;
         ++cell, row = row + 1 == layout.affine_rows ? 0 : row + 1) {
      const int64_t slot = slots == nullptr ? cell : slots[cell];
      const auto center = static_cast<A>(mean[slot]);
      const double shift = (static_cast<double>(center) - mean[slot]) * rstd[slot];
      const double w = weight == nullptr ? 1 : static_cast<double>(weight[row]);
      at(kCenter)[cell] = center;
      at(kRstd)[cell] = static_cast<A>(rstd[slot]);
      at(kShift)[cell] = static_cast<A>(shift);
      at(kScale)[cell] = static_cast<A>(rstd[slot] * w);
      at(kOffset)[cell] =
          static_cast<A>(shift * w + (bias == nullptr ? 0 : static_cast<double>(bias[row])));
      more(cell, slot, rstd[slot], shift, rstd[slot] * w);
    }
  }

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
