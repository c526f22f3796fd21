#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <string>

#include "autograd/moments.h"

namespace syncnorm {

/// What one call of a norm fixes for its forward, its backward and the backward of that.
struct NormCall : torch::CustomClassHolder {
  std::shared_ptr<Communicator> comm;
  std::string module;
  double eps = 0;
  double count = 0;              ///< values a slot over all ranks
  bool reduce_backward = false;  ///< some rank's input needs a gradient, so every rank takes part
};

/// y = (x - mean) / sqrt(variance + eps) * weight + bias, differentiable through the statistics of
/// all ranks.
///
/// `x` [N, C, ...]; `weight`, `bias` [C] or undefined; `moments` of exchange_moments on x. Backward
/// is one all-reduce of two sums a slot (none where no rank's input needs a gradient); under
/// create_graph it is a composition of differentiable operations, so that higher derivatives
/// follow. The gradients of weight and bias are this rank's sums.
at::Tensor apply_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const Moments& moments, const c10::intrusive_ptr<NormCall>& call);

}  // namespace syncnorm
