#include <array>

#include "kernels/kernels.h"

namespace syncnorm::kernels {
namespace {

at::Tensor as_slots(const at::Tensor& x, const SlotLayout& layout) {
  return x.as_strided({layout.outer, layout.slots, layout.inner},
                      {layout.slots * layout.inner, layout.inner, 1});
}

constexpr std::array<int64_t, 2> kAllButSlots{0, 2};

at::Tensor per_slot(const at::Tensor& values) { return values.view({1, -1, 1}); }

std::array<int64_t, 3> by_column(const SlotLayout& layout, const Columns& columns) {
  return {layout.slots / columns.rows, columns.rows, layout.inner};
}

/// [rows, inner] repeated to [1, slots, inner].
at::Tensor over_cells(const at::Tensor& values, const SlotLayout& layout, const Columns& columns) {
  return values.view({1, columns.rows, layout.inner})
      .expand(by_column(layout, columns))
      .reshape({1, layout.slots, layout.inner});
}

class ReferenceKernels final : public KernelSet {
 public:
  at::Tensor moments(const at::Tensor& x, const SlotLayout& layout,
                     const at::Tensor& center) const override {
    const auto shifted = as_slots(x, layout).to(at::kDouble) - per_slot(center);
    return at::stack({shifted.sum(kAllButSlots), (shifted * shifted).sum(kAllButSlots)});
  }

  BackwardSums backward_sums(const at::Tensor& x, const at::Tensor& dy, const SlotLayout& layout,
                             const at::Tensor& affine, const Columns& columns) const override {
    const auto shifted = as_slots(x, layout).to(at::kDouble) - per_slot(affine[0]);
    auto gradient = as_slots(dy, layout).to(at::kDouble);
    BackwardSums sums;
    if (columns.any()) {
      const auto xhat = shifted * per_slot(affine[1]) + per_slot(affine[2]);
      const auto total = [&](const at::Tensor& values) {
        return values.reshape(by_column(layout, columns)).sum(0);
      };
      sums.columns = at::stack({total(gradient * xhat), total(gradient)});
      if (columns.weight.defined())
        gradient = gradient * over_cells(columns.weight, layout, columns).to(at::kDouble);
    }
    sums.slots = at::stack({gradient.sum(kAllButSlots), (gradient * shifted).sum(kAllButSlots)});
    return sums;
  }

  void apply(const at::Tensor& x, const SlotLayout& layout, const at::Tensor& coefficients,
             const Columns& columns, const at::Tensor& y) const override {
    const auto& k = coefficients;
    auto result = (as_slots(x, layout) - per_slot(k[0])) * per_slot(k[1]) + per_slot(k[2]);
    if (columns.weight.defined()) result = result * over_cells(columns.weight, layout, columns);
    if (columns.bias.defined()) result = result + over_cells(columns.bias, layout, columns);
    as_slots(y, layout).copy_(result);
  }

  void backward_apply(const at::Tensor& x, const at::Tensor& dy, const SlotLayout& layout,
                      const at::Tensor& coefficients, const Columns& columns,
                      const at::Tensor& dx) const override {
    const auto& k = coefficients;
    auto gradient = as_slots(dy, layout);
    if (columns.weight.defined()) gradient = gradient * over_cells(columns.weight, layout, columns);
    as_slots(dx, layout)
        .copy_(gradient * per_slot(k[2]) +
               (as_slots(x, layout) - per_slot(k[0])) * per_slot(k[1]) * per_slot(k[3]) +
               per_slot(k[4]));
  }
};

}  // namespace

const KernelSet& reference_kernels() {
  static const ReferenceKernels set;
  return set;
}

}  // namespace syncnorm::kernels
