#pragma once

#include <mutex>

namespace syncnorm {

/// Under MPI_THREAD_SERIALIZED the threads of this process take turns: while a lock lives, no other
/// thread is in MPI.
class SerialLock {
 public:
  explicit SerialLock(bool serialized);

 private:
  std::unique_lock<std::mutex> lock_;
};

/// Whether MPI runs under MPI_THREAD_SERIALIZED; raises c10::Error where it is not initialised, or
/// for one thread only.
bool mpi_is_serialized();

}  // namespace syncnorm
