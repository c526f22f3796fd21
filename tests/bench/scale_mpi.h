#pragma once

#include <mpi.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "syncnorm/communicator.h"

namespace syncnorm::bench {

/// How to call MPI: blocking, or nonblocking and polled as the library's communicator polls small
/// payloads.
enum class Call { blocking, polled };

/// MPI's own all-reduce of doubles on all ranks, with nothing round it: no checks, no time-out. A
/// norm over it costs what MPI itself makes it cost.
class BareCommunicator final : public Communicator {
 public:
  explicit BareCommunicator(const Communicator& world, Call call)
      : Communicator(world.rank(), world.size(),
                     call == Call::blocking ? "MPI_Allreduce" : "MPI_Iallreduce"),
        call_(call) {
    MPI_Comm_dup(MPI_COMM_WORLD, &comm_);
  }
  ~BareCommunicator() override { MPI_Comm_free(&comm_); }

  void reduce(double* words, int64_t count) {
    const int length = static_cast<int>(count);
    if (call_ == Call::blocking) {
      MPI_Allreduce(MPI_IN_PLACE, words, length, MPI_DOUBLE, MPI_SUM, comm_);
      return;
    }
    constexpr int kSpins = 200;
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Iallreduce(MPI_IN_PLACE, words, length, MPI_DOUBLE, MPI_SUM, comm_, &request);
    int done = 0;
    for (int polls = 0;; ++polls) {
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (done) return;
      if (polls >= kSpins) std::this_thread::yield();
    }
  }

 private:
  void do_all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    TORCH_CHECK(tensor.scalar_type() == at::kDouble && op == ReduceOp::sum,
                "this communicator sums doubles only");
    reduce(tensor.data_ptr<double>(), tensor.numel());
  }
  [[noreturn]] static void refuse() { TORCH_CHECK(false, "this communicator sums doubles only"); }
  at::Tensor do_all_gather(const at::Tensor&, at::IntArrayRef) override { refuse(); }
  at::Tensor do_reduce_scatter(const at::Tensor&, at::IntArrayRef) override { refuse(); }
  void do_broadcast(const at::Tensor&, int) override { refuse(); }
  void do_barrier() override { refuse(); }
  std::shared_ptr<Communicator> do_split(int, int) override { refuse(); }

  Call call_;
  MPI_Comm comm_ = MPI_COMM_NULL;
};

}  // namespace syncnorm::bench
