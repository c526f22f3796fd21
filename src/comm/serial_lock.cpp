#include "comm/serial_lock.h"

#include <c10/util/Exception.h>
#include <mpi.h>

#include "comm/mpi_check.h"

namespace syncnorm {

SerialLock::SerialLock(bool serialized) {
  static std::mutex mutex;
  if (serialized) lock_ = std::unique_lock<std::mutex>(mutex);
}

bool mpi_is_serialized() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  TORCH_CHECK(initialized,
              "mpi_communicator: MPI is not initialised; make a syncnorm::Environment first");
  int level = MPI_THREAD_SINGLE;
  check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
  TORCH_CHECK(level >= MPI_THREAD_SERIALIZED,
              "mpi_communicator: MPI was initialised for one thread only; initialise it with "
              "MPI_Init_thread and MPI_THREAD_MULTIPLE, or let syncnorm::Environment do it");
  return level == MPI_THREAD_SERIALIZED;
}

}  // namespace syncnorm
