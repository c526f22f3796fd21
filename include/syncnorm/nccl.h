#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "syncnorm/communicator.h"

namespace syncnorm {

/// A communicator over NCCL for tensors on `device`, this rank's GPU. Collective over `bootstrap`,
/// of which it keeps a duplicate: NCCL's id travels through it, and so do CPU tensors,
/// diagnostics (SYNCNORM_CHECK=full) and whatever `split` has to agree on.
///
/// Operations are queued on PyTorch's current stream of `device` and return without waiting for
/// the device; they may be captured in a CUDA graph. `barrier()` alone waits, and cannot be
/// captured. Half and bfloat16 are added in their own dtype, rounded at every step from rank to
/// rank, 16-bit integers as 32-bit ones. Order between streams is the caller's: use a communicator
/// from one stream at a time.
///
/// An operation that is unfinished SYNCNORM_TIMEOUT seconds after it was queued, that a rank of
/// this node has ended without, or that NCCL reports as failed, is aborted: one line on stderr says
/// so at once, since the host may be waiting for the stream, and the next call and every later one
/// raises CommunicationError with the same message. What the aborted operation left in its tensors
/// is undefined. Operations replayed by a CUDA graph have no time-out, but NCCL's own error reports
/// end them too. NCCL_COMM_BLOCKING=1 makes NCCL's calls wait inside NCCL, where they cannot time
/// out.
///
/// Where two ranks share one GPU, which NCCL refuses, rank 0 says so in one line on stderr and all
/// ranks get the duplicate of `bootstrap` instead, which stages such tensors through the host.
///
/// The library uses the libnccl.so.2 that LibTorch has loaded, found at the first call. Raises
/// c10::Error for a device that is no GPU, and where the library was built without NCCL;
/// CommunicationError on every rank where NCCL is missing, too old or of different versions, or
/// where the ranks do not come together in half of SYNCNORM_TIMEOUT.
std::shared_ptr<Communicator> nccl_communicator(const std::shared_ptr<Communicator>& bootstrap,
                                                c10::Device device);

}  // namespace syncnorm
