#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "syncnorm/communicator.h"
#include "syncnorm/sharding.h"

namespace syncnorm {

// Collectives that autograd sees through, for layers whose features ("columns", the last dimension)
// are split over the ranks of a group. Each backward is the conjugate operation, itself one of
// these, so that derivatives of any order follow. Inputs have any leading dimensions, zero rows
// included, any strides and any dtype that the communicator reduces; values travel in that dtype.
// `name` is the module for error messages, in forward and backward.
//
// A tensor is either *replicated* (the same on every rank, with the same gradient), *consumed
// apart* (the same on every rank, but each rank computes its own share of what follows, so that its
// gradient there is a part of the sum) or *sharded* by columns. `sizes[r]` are rank r's columns.
// All ranks call alike, inputs that need a gradient among them. Raises c10::Error before
// communicating where shapes do not fit.

/// Replicated x, to be consumed apart. Forward: x. Backward: all-reduce. (f of Shoeybi et al. 2019,
/// "Megatron-LM".)
torch::Tensor copy_to_ranks(const torch::Tensor& x, const std::shared_ptr<Communicator>& comm,
                            const std::string& name);

/// Sum of the ranks' `x`, replicated. Forward: all-reduce. Backward: identity. (g of the same
/// paper.)
torch::Tensor reduce_from_ranks(const torch::Tensor& x, const std::shared_ptr<Communicator>& comm,
                                const std::string& name);

/// Whole [..., sum(sizes)] of the shards `x` [..., sizes[rank]], to be consumed apart. Forward:
/// all-gather. Backward: reduce-scatter. The result's columns, not its rows, are contiguous.
torch::Tensor gather_columns(const torch::Tensor& x, const std::vector<int64_t>& sizes,
                             const std::shared_ptr<Communicator>& comm, const std::string& name);

/// This rank's columns [..., sizes[rank]] of the sum of the ranks' `x` [..., sum(sizes)]. Forward:
/// reduce-scatter. Backward: all-gather. The result's columns, not its rows, are contiguous; an `x`
/// laid out like that travels without a copy.
torch::Tensor scatter_sum_columns(const torch::Tensor& x, const std::vector<int64_t>& sizes,
                                  const std::shared_ptr<Communicator>& comm,
                                  const std::string& name);

/// This rank's columns [..., sizes[rank]] of a replicated `x` [..., sum(sizes)], a copy. Forward:
/// no communication. Backward: all-gather.
torch::Tensor take_columns(const torch::Tensor& x, const std::vector<int64_t>& sizes,
                           const std::shared_ptr<Communicator>& comm, const std::string& name);

/// Whole [..., sum(sizes)] of the shards `x`, replicated: what follows is computed alike on every
/// rank. Forward: all-gather. Backward: this rank's columns of the gradient, no communication.
torch::Tensor gather_replicated_columns(const torch::Tensor& x, const std::vector<int64_t>& sizes,
                                        const std::shared_ptr<Communicator>& comm,
                                        const std::string& name);

/// A shard some of whose positions other ranks hold too. Forward: `parameter`. Backward: those
/// positions' gradients become the sum over the ranks that hold them: one all-reduce of just
/// `sharding.shared_ranges()`, in which ranks that hold none of them join; without any, nothing
/// happens.
torch::Tensor sum_shared_gradient(const torch::Tensor& parameter, const Sharding& sharding,
                                  const std::string& name);

/// A replicated parameter that each rank uses for its own share of the work. Forward: `parameter`.
/// Backward: all-reduce.
torch::Tensor sum_gradient(const torch::Tensor& parameter,
                           const std::shared_ptr<Communicator>& comm, const std::string& name);

}  // namespace syncnorm
