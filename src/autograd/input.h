#pragma once

#include <ATen/ATen.h>

#include "kernels/kernels.h"

namespace syncnorm {

/// A tensor [N, C, ...] as the kernels read it: dense, in the dtype that is computed in, with its
/// channels as slots.
struct ChannelInput {
  explicit ChannelInput(const at::Tensor& tensor);

  /// `tensor`, of the same shape, brought to the same memory order and dtype.
  at::Tensor match(const at::Tensor& tensor) const;

  at::Tensor data;
  at::MemoryFormat format;
  kernels::SlotLayout layout;
};

/// float for half and bfloat16, otherwise `dtype`.
at::ScalarType compute_dtype(at::ScalarType dtype);

}  // namespace syncnorm
