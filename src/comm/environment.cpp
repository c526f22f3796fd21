#include "syncnorm/environment.h"

#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>

#include "comm/mpi_check.h"
#include "comm/status_board.h"
#include "comm/timeout.h"
#include "syncnorm/mpi.h"

namespace syncnorm {
namespace {

Environment* living = nullptr;
StatusBoard* board = nullptr;

int environment_number(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? 0 : std::atoi(text);
}

// A program linked to one MPI and started by another's launcher, or by srun without MPI support,
// sees itself alone.
void refuse_separate_worlds(int world_size) {
  if (world_size != 1) return;
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PMI_SIZE"}) {
    const int tasks = environment_number(name);
    TORCH_CHECK(tasks <= 1, "syncnorm::Environment: the launcher started ", tasks, " tasks (", name,
                "), but MPI came up as separate worlds of one rank each. Start with the mpirun of "
                "the MPI that the program is "
                "linked to; under Slurm use 'srun --mpi=pmix' with a PMIx-enabled Open MPI, or "
                "mpirun inside the allocation");
  }
}

/// ATen's threads for this rank: its own cores where the launcher bound the ranks apart, else its
/// share of the common ones.
int fair_threads(MPI_Comm node, int local_size) {
  cpu_set_t mine;
  cpu_set_t all;
  CPU_ZERO(&mine);
  if (sched_getaffinity(0, sizeof mine, &mine) != 0) return 1;
  check_mpi(MPI_Allreduce(&mine, &all, sizeof mine, MPI_BYTE, MPI_BOR, node), "MPI_Allreduce");
  const int cores = CPU_COUNT(&mine);
  const bool apart = CPU_COUNT(&all) > cores;
  return std::max(1, apart ? cores : cores / local_size);
}

// Programs link the CPU half of LibTorch, since the CUDA half costs every process a third of a
// second at start. Where the driver's device is there, load it, before anybody asks ATen whether
// there is CUDA: ATen remembers the answer.
void load_cuda_where_there_is_a_gpu() {
  if (access("/dev/nvidiactl", F_OK) == 0) dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL);
}

// MPI cannot be finalized in order any more. The job ends when this process does, so that whoever
// catches the exception can still print it; a process that lives on regardless is not waited for.
void end_job_at_exit() {
  static const auto abort = [] { MPI_Abort(MPI_COMM_WORLD, 1); };
  std::atexit([] { abort(); });
  std::thread([] {
    std::this_thread::sleep_for(std::chrono::seconds(5));
    abort();
  }).detach();
}

}  // namespace

Environment* Environment::current() { return living; }

Environment::Environment() {
  int argc = 0;
  char** argv = nullptr;
  start(argc, argv);
}

Environment::Environment(int& argc, char**& argv) { start(argc, argv); }

void Environment::start(int& argc, char**& argv) {
  TORCH_CHECK(living == nullptr,
              "syncnorm::Environment: one is living already; a program makes one, in main()");
  exceptions_at_start_ = std::uncaught_exceptions();
  load_cuda_where_there_is_a_gpu();
  int finalized = 0;
  MPI_Finalized(&finalized);
  TORCH_CHECK(
      !finalized,
      "syncnorm::Environment: MPI was finalized before; it cannot start twice in a process");
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (!initialized) {
    // Open MPI's nonblocking all-reduce goes up and down a tree unless told otherwise; recursive
    // doubling (4) halves its latency, and gives every rank the same bits too.
    ::setenv("OMPI_MCA_coll_libnbc_iallreduce_algorithm", "4", /*overwrite=*/0);
    int provided = MPI_THREAD_SINGLE;
    check_mpi(MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    owns_mpi_ = true;
  }
  int world_size = 1;
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &world_size), "MPI_Comm_size");
  refuse_separate_worlds(world_size);
  MPI_Comm node = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node),
            "MPI_Comm_split_type");
  MPI_Comm_rank(node, &local_rank_);
  MPI_Comm_size(node, &local_size_);
  if (std::getenv("OMP_NUM_THREADS") == nullptr)
    at::set_num_threads(fair_threads(node, local_size_));
  check_mpi(MPI_Comm_free(&node), "MPI_Comm_free");
  board = new StatusBoard();
  world_ = mpi_communicator(MPI_COMM_WORLD);
  living = this;
}

Environment::~Environment() {
  living = nullptr;
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized) return;
  const bool unwinding = std::uncaught_exceptions() > exceptions_at_start_;
  if (unwinding || operation_abandoned()) {
    std::fprintf(
        stderr, "syncnorm: rank %d of %d ends the job: %s\n", world_->rank(), world_->size(),
        unwinding ? "an exception left its program" : "it gave up waiting for the other ranks");
    std::fflush(nullptr);
    board->set_phase(StatusBoard::Phase::failed);
    end_job_at_exit();
    return;
  }
  board->set_phase(StatusBoard::Phase::finalizing);
  world_.reset();
  board->release();
  delete board;
  board = nullptr;
  if (owns_mpi_) MPI_Finalize();
}

c10::Device Environment::device() const {
  const int gpus = at::hasCUDA() ? static_cast<int>(at::detail::getCUDAHooks().deviceCount()) : 0;
  if (gpus == 0) return c10::Device(c10::kCPU);
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(local_rank_ % gpus));
}

std::shared_ptr<Communicator> communicator_or_world(const std::shared_ptr<Communicator>& comm,
                                                    const std::string& who) {
  if (comm != nullptr) return comm;
  TORCH_CHECK(living != nullptr, who,
              " has no communicator: make a syncnorm::Environment in main(), or pass one with "
              ".communicator(...) (syncnorm::self_communicator() for this process alone)");
  return living->world();
}

}  // namespace syncnorm
