#pragma once

#include <gtest/gtest.h>
#include <mpi.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "syncnorm/communicator.h"
#include "syncnorm/mpi.h"

namespace syncnorm::testing {

/// All ranks of the test job, over a duplicate of its own: counters start at zero, and a failure
/// stays in the test.
inline std::shared_ptr<Communicator> new_world() { return mpi_communicator(MPI_COMM_WORLD); }

inline std::vector<int64_t> ones(int count) { return std::vector<int64_t>(count, 1); }

/// False where norms queue their work and do not look at what comes back, as on a GPU: then there
/// is no second exchange where digits were lost, and backward communicates whoever wants a
/// gradient.
inline bool host_waits() { return kernels::kernels_for(torch::kCPU).deferred() == nullptr; }

/// True where `tensor` is the same on all ranks, bit for bit.
inline bool bit_equal_across(Communicator& comm, const torch::Tensor& tensor) {
  const auto mine = tensor.detach().contiguous().view(-1);
  if (mine.numel() == 0) return true;
  const auto bytes = mine.view(torch::kUInt8).view({1, -1});
  const auto all = comm.all_gather(bytes, ones(comm.size()));
  return torch::equal(all, bytes.expand_as(all));
}

/// Largest |a - b| relative to the largest |b| (or 1, where b is smaller).
inline double relative_difference(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.sizes() != b.sizes()) return std::numeric_limits<double>::infinity();
  if (a.numel() == 0) return 0;
  const auto x = a.detach().to(torch::kDouble);
  const auto y = b.detach().to(torch::kDouble);
  return ((x - y).abs().max() / y.abs().max().clamp_min(1)).item<double>();
}

/// The message of the exception of type `E` that `body` throws; a test failure where it throws
/// none.
template <typename E, typename F>
std::string message_of(F&& body) {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "no exception was thrown";
  return "";
}

}  // namespace syncnorm::testing
