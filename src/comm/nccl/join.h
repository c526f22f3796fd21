#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/nccl/api.h"
#include "syncnorm/communicator.h"

namespace syncnorm::nccl {

/// What the ranks have in common once NCCL has brought them together.
struct Joined {
  ncclComm_t comm = nullptr;
  uint64_t uid = 0;              ///< equal on all ranks, and no other communicator's
  std::vector<int> world_ranks;  ///< numbers in MPI_COMM_WORLD, -1 without MPI
};

/// Makes an NCCL communicator of the ranks of `bootstrap`. Collective. Returns nothing, on every
/// rank, where two ranks are on one GPU, having said so on rank 0's stderr; raises
/// CommunicationError, on every rank, where any of them fails. `name` is for messages.
std::optional<Joined> join(const Backend& backend, Communicator& bootstrap, int device,
                           const std::string& name);

}  // namespace syncnorm::nccl
