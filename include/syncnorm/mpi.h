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
std::shared_ptr<Communicator> mpi_communicator(MPI_Comm comm);

}  // namespace syncnorm
