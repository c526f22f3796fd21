#include "comm/world_errors.h"

#include <mpi.h>

#include <cstdio>
#include <mutex>

#include "comm/mpi_check.h"

namespace syncnorm {
namespace {

thread_local int guards = 0;

void fatal_unless_guarded(MPI_Comm* comm, int* code, ...) {
  if (guards > 0) return;
  int rank = -1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::fprintf(stderr, "rank %d: MPI error on MPI_COMM_WORLD: %s\n", rank,
               mpi_error_text(*code).c_str());
  std::fflush(nullptr);
  MPI_Abort(*comm, *code);
}

}  // namespace

ReturnWorldErrors::ReturnWorldErrors() { ++guards; }
ReturnWorldErrors::~ReturnWorldErrors() { --guards; }

void ReturnWorldErrors::install() {
  static std::once_flag once;
  std::call_once(once, [] {
    MPI_Errhandler current = MPI_ERRHANDLER_NULL;
    check_mpi(MPI_Comm_get_errhandler(MPI_COMM_WORLD, &current), "MPI_Comm_get_errhandler");
    if (current != MPI_ERRORS_ARE_FATAL) return;
    MPI_Errhandler ours = MPI_ERRHANDLER_NULL;
    check_mpi(MPI_Comm_create_errhandler(fatal_unless_guarded, &ours),
              "MPI_Comm_create_errhandler");
    check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, ours), "MPI_Comm_set_errhandler");
    MPI_Errhandler_free(&ours);
  });
}

}  // namespace syncnorm
