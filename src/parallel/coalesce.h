#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "syncnorm/communicator.h"

namespace syncnorm {

/// Joins all tensors (of one dtype and device) end to end into one dimension.
at::Tensor flatten(const std::vector<at::Tensor>& tensors);

/// Copies the parts of `flat` that flatten() would have made of `tensors` into them.
void unflatten(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

/// Cuts `tensors` into groups of one dtype and device of at most `cap_bytes` (or one tensor) each.
/// Groups and the order in them depend only on dtypes, devices and sizes, so that ranks which hold
/// the same kinds of tensors agree.
std::vector<std::vector<at::Tensor>> group_by_kind(const std::vector<at::Tensor>& tensors,
                                                   int64_t cap_bytes);

/// Overwrites `tensors` with rank `root`'s, in as few broadcasts as dtypes and devices allow.
void broadcast_coalesced(Communicator& comm, const std::vector<at::Tensor>& tensors, int root);

}  // namespace syncnorm
