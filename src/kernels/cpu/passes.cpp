#include "kernels/cpu/passes.h"

#include "kernels/cpu/coefficients.h"

namespace syncnorm::kernels::passes {

void fold(const std::vector<loops::Sums>& of_cells, const NormLayout& layout,
          const at::Tensor& share, const double* weight, const at::Tensor& of_slots) {
  auto* first = of_slots.data_ptr<double>();
  auto* second = first + (layout.sums() - 1) * layout.slots;
  const auto* slots = slot_map(layout);
  const auto* counted = share.defined() ? share.const_data_ptr<double>() : nullptr;
  std::fill_n(first, layout.sums() * layout.slots, 0.0);
  for (size_t c = 0; c < of_cells.size(); ++c) {
    const int64_t slot = slots == nullptr ? static_cast<int64_t>(c) : slots[c];
    double factor = counted == nullptr ? 1 : counted[c];
    if (weight != nullptr) factor *= weight[c % layout.affine_rows];
    if (layout.centered) first[slot] += factor * of_cells[c].first;
    second[slot] += factor * of_cells[c].second;
  }
}

void fold_affine(const std::vector<loops::Sums>& of_cells, const NormLayout& layout,
                 const at::Tensor& of_affine) {
  auto* bias = of_affine.data_ptr<double>();
  auto* weight = bias + layout.affine_rows;
  std::fill_n(bias, 2 * layout.affine_rows, 0.0);
  for (size_t c = 0; c < of_cells.size(); ++c) {
    bias[c % layout.affine_rows] += of_cells[c].first;
    weight[c % layout.affine_rows] += of_cells[c].second;
  }
}

}  // namespace syncnorm::kernels::passes
