#pragma once

#include <mpi.h>

#include <memory>

#include "syncnorm/communicator.h"

namespace syncnorm {

/// A communicator over a duplicate of `comm`; MPI must be initialised. Collective over `comm`.
///
/// Errors return as CommunicationError (MPI_ERRORS_RETURN is set on the duplicate only). Counts
/// above 2^31-1 are split. Needs MPI_THREAD_MULTIPLE, or MPI_THREAD_SERIALIZED, where calls take
/// turns behind one lock for the process.
///
/// CUDA tensors go through pinned host memory on PyTorch's current stream, for which the host
/// waits. Where MPI says that it is CUDA-aware (MPIX_Query_cuda_support), gathers and broadcasts of
/// more than 32 KiB are made from device memory instead.
std::shared_ptr<Communicator> mpi_communicator(MPI_Comm comm);

}  // namespace syncnorm
