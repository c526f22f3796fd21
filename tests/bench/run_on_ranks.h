#pragma once

#include <mpi.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>

#include "syncnorm/environment.h"

namespace syncnorm::bench {

/// main() of a program of several ranks: runs `run(world, argc, argv)` and makes of what it throws
/// a message and a status. Wrong flags are wrong on every rank; anything else ends the whole job.
template <typename Run>
int run_on_ranks(int argc, char** argv, Run&& run) {
  Environment environment(argc, argv);
  try {
    return run(environment.world(), argc, argv);
  } catch (const c10::ValueError& error) {
    if (environment.world()->rank() == 0)
      std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", environment.world()->rank(), error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
    return 1;
  }
}

}  // namespace syncnorm::bench
