#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "syncnorm/communicator.h"

namespace syncnorm {

/// A communicator over any libtorch process group (NCCL, Gloo, one of Python's, ...).
std::shared_ptr<Communicator> c10d_communicator(
    c10::intrusive_ptr<c10d::ProcessGroup> process_group);

/// The way back: a libtorch process group whose collectives run over a duplicate of `comm` (`split`
/// with one color), in the order they were issued, on a thread of its own, so that callers such as
/// c10d::Reducer overlap them with computation. Collective over `comm`. Offers allreduce (also
/// coalesced), broadcast, allgather, reduce_scatter, barrier and split; other operations raise.
c10::intrusive_ptr<c10d::ProcessGroup> as_process_group(const std::shared_ptr<Communicator>& comm);

}  // namespace syncnorm
