#pragma once

#include <torch/types.h>

#include "autograd/norm_gather.h"

namespace syncnorm {

/// norm(x) W^T + b for x [rows, h], this rank's columns of whole rows; one all-gather forward, one
/// reduce-scatter backward. `norm_weight`, `norm_bias` [h], `bias` [out] may be undefined. Under
/// create_graph the backward differentiates the plain composition of norm, gather and product.
at::Tensor norm_linear(const at::Tensor& x, const at::Tensor& norm_weight,
                       const at::Tensor& norm_bias, const at::Tensor& weight,
                       const at::Tensor& bias, const c10::intrusive_ptr<NormLinearCall>& call);

}  // namespace syncnorm
