#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "autograd/norm_function.h"

namespace syncnorm {

/// The gradients (dx, dweight, dbias) of one norm without activation as a graph of differentiable
/// operations, computed in double.
///
/// Where the plain backward treats the statistics as constants of the forward, here they depend on
/// `x` again: one all-reduce recomputes them about the known `mean`, one more carries the sums of
/// the gradient. Undefined where the input is.
torch::autograd::variable_list differentiable_backward(const at::Tensor& x,
                                                       const at::Tensor& weight,
                                                       const at::Tensor& bias, const at::Tensor& dy,
                                                       const at::Tensor& mean, const NormPart& part,
                                                       const NormCall& call);

}  // namespace syncnorm
