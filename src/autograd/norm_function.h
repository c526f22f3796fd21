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
  NormLayout layout;
  at::Tensor count;              ///< values a slot over all ranks, double [] or [slots]
  bool reduce_backward = false;  ///< some rank's input needs a gradient, so every rank takes part
};

/// y = (x - mean) / sqrt(variance + eps) * weight + bias, differentiable through the statistics of
/// all ranks.
///
/// `weight`, `bias` as the layout says, or undefined (a bias only with a weight); `moments` of
/// exchange_moments on x. Backward is one all-reduce of two sums a slot, one where the norm is not
/// centered, none where no rank's input needs a gradient; under create_graph it is a composition of
/// differentiable operations, so that higher derivatives follow. The gradients of weight and bias
/// are this rank's sums.
at::Tensor apply_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const Moments& moments, const c10::intrusive_ptr<NormCall>& call);

/// Statistics and application in one: exchange_moments about zero, then apply_norm. `call` brings
/// comm, module, eps and layout; `details` is what else must agree between the ranks.
at::Tensor normalize(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                     const c10::intrusive_ptr<NormCall>& call, const std::string& details);

}  // namespace syncnorm
