#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "syncnorm/communicator.h"

namespace syncnorm {

/// Owns MPI for the life of a program: make one first thing in main().
///
/// Initialises MPI unless somebody did (then it does not finalize it either), asking for
/// MPI_THREAD_MULTIPLE and accepting MPI_THREAD_SERIALIZED. Sets ATen's threads to this rank's
/// share of the node's cores unless OMP_NUM_THREADS is set. Raises c10::Error when a launcher
/// started N tasks that came up as N separate worlds of one. Destroyed by an escaping exception it
/// ends the whole job with a message, since the other ranks would wait for this one for ever.
class Environment {
 public:
  Environment(int& argc, char**& argv);
  Environment();
  ~Environment();
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

  /// All ranks of the job.
  const std::shared_ptr<Communicator>& world() const { return world_; }

  /// Rank among, and number of, the ranks on this node.
  int local_rank() const { return local_rank_; }
  int local_size() const { return local_size_; }

  /// The GPU of this rank (local_rank modulo the node's GPUs), or the CPU where there is none.
  c10::Device device() const;

  /// The living environment, or null.
  static Environment* current();

 private:
  void start(int& argc, char**& argv);

  std::shared_ptr<Communicator> world_;
  int local_rank_ = 0;
  int local_size_ = 1;
  bool owns_mpi_ = false;
  int exceptions_at_start_ = 0;
};

/// `comm` itself, or the living Environment's world where it is null; raises c10::Error where there
/// is neither.
std::shared_ptr<Communicator> communicator_or_world(const std::shared_ptr<Communicator>& comm,
                                                    const std::string& who);

}  // namespace syncnorm
