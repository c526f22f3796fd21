#pragma once

#include <ATen/ATen.h>

#include "autograd/layout.h"

namespace syncnorm {

/// The statistics of every cell, as the kernels take them.
///
/// `center` is the part of the mean that the dtype of computation holds: subtracting it first costs
/// x no digits, the small rest goes into `shift`, so that xhat = (x - center)*rstd + shift.
struct Cells {
  /// `mean`, `rstd`: double [slots].
  Cells(const NormLayout& layout, const at::Tensor& mean_of_slots, const at::Tensor& rstd_of_slots,
        at::ScalarType dtype);

  at::Tensor rstd, center, rest, shift;  ///< double [cells]
};

/// Weight and bias as the kernels take them: by column, or folded into coefficients of cells.
struct Affine {
  /// Empty tensors stand for absent ones.
  Affine(const at::Tensor& weight, const at::Tensor& bias, const NormInput& input,
         const NormLayout& layout);

  /// `values` [cells] times the weight of each cell.
  at::Tensor scaled(const at::Tensor& values) const {
    return of_cells.defined() ? values * of_cells : values;
  }

  kernels::Columns columns;
  at::Tensor of_cells, bias_of_cells;  ///< double [cells], or undefined
};

/// y = xhat * weight + bias, in the dtype that is computed in.
at::Tensor apply_forward(const NormInput& input, const NormLayout& layout, const at::Tensor& weight,
                         const at::Tensor& bias, const at::Tensor& mean, const at::Tensor& rstd);

/// What this rank's elements add to the means that dx needs, and to the gradients of the affine
/// parameters.
struct LocalSums {
  at::Tensor of_slots;   ///< double [2 or 1, slots]: sum(g), sum(g * xhat), the first if centered
  at::Tensor of_affine;  ///< double [2, ...]: those of bias, of weight
};
LocalSums backward_sums(const NormInput& input, const NormLayout& layout, const Cells& cells,
                        const Affine& affine, const at::Tensor& dy);

/// dx = rstd*(g - mean(g) - xhat*mean(g*xhat)), g = dy * weight, the first mean left out where not
/// centered. `means`: double [2 or 1, slots].
at::Tensor apply_backward(const NormInput& input, const NormLayout& layout, const Cells& cells,
                          const Affine& affine, const at::Tensor& dy, const at::Tensor& means);

/// `sum` in the shape and dtype of the parameter whose gradient it is.
at::Tensor gradient_of(const at::Tensor& parameter, const at::Tensor& sum);

}  // namespace syncnorm
