#pragma once

#include <memory>

#include "comm/nccl/api.h"
#include "syncnorm/communicator.h"

namespace syncnorm::nccl {

/// nccl_communicator over the functions in `backend`, for any device whose memory those can reach.
std::shared_ptr<Communicator> make_communicator(const Backend& backend,
                                                const std::shared_ptr<Communicator>& bootstrap,
                                                c10::Device device);

}  // namespace syncnorm::nccl
