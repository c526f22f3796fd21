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

class ReferenceKernels final : public KernelSet {
 public:
  at::Tensor moments(const at::Tensor& x, const SlotLayout& layout,
                     const at::Tensor& center) const override {
    const auto shifted = as_slots(x, layout).to(at::kDouble) - per_slot(center);
    return at::stack({shifted.sum(kAllButSlots), (shifted * shifted).sum(kAllButSlots)});
  }

  at::Tensor backward_sums(const at::Tensor& x, const at::Tensor& dy, const SlotLayout& layout,
                           const at::Tensor& center) const override {
    const auto shifted = as_slots(x, layout).to(at::kDouble) - per_slot(center);
    const auto gradient = as_slots(dy, layout).to(at::kDouble);
    return at::stack({gradient.sum(kAllButSlots), (gradient * shifted).sum(kAllButSlots)});
  }

  void apply(const at::Tensor& x, const SlotLayout& layout, const at::Tensor& coefficients,
             const at::Tensor& y) const override {
    const auto& k = coefficients;
    as_slots(y, layout).copy_((as_slots(x, layout) - per_slot(k[0])) * per_slot(k[1]) +
                              per_slot(k[2]));
  }

  void backward_apply(const at::Tensor& x, const at::Tensor& dy, const SlotLayout& layout,
                      const at::Tensor& coefficients, const at::Tensor& dx) const override {
    const auto& k = coefficients;
    as_slots(dx, layout)
        .copy_(as_slots(dy, layout) * per_slot(k[1]) +
               (as_slots(x, layout) - per_slot(k[0])) * per_slot(k[2]) + per_slot(k[3]));
  }
};

}  // namespace

const KernelSet& reference_kernels() {
  static const ReferenceKernels set;
  return set;
}

}  // namespace syncnorm::kernels
