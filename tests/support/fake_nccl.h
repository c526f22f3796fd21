#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "comm/nccl/api.h"

namespace syncnorm::testing {

/// NCCL and the CUDA runtime on host memory: collectives run at once, over MPI. One for the
/// process, since what it stands for is plain functions.
struct FakeNccl {
  // What goes wrong, on this rank.
  std::string gpu;  ///< its PCI bus id
  int version = 22809;
  std::atomic<bool> unique_id_fails{false};
  std::atomic<bool> init_fails{false};
  std::atomic<bool> init_hangs{false};
  std::atomic<bool> start_hangs{false};   ///< collectives stay in progress and do nothing
  std::atomic<bool> device_hangs{false};  ///< collectives do nothing, their events stay unready
  std::atomic<bool> stream_full{false};   ///< nothing more is recorded before the device goes on
  std::atomic<bool> call_fails{false};    ///< collectives return an error
  std::atomic<bool> finalize_hangs{false};
  std::atomic<bool> capturing{false};
  std::atomic<bool> driver_gone{false};
  std::atomic<int> async_error{ncclSuccess};
  std::atomic<int> event_error{cudaSuccess};
  std::atomic<int> polls{0};  ///< answers of ncclInProgress before each result

  // What happened.
  std::atomic<int> created{0}, destroyed{0}, aborted{0};
  std::atomic<int> events_created{0}, events_destroyed{0};
  std::atomic<int> misuses{0};  ///< calls on an ended communicator or another stream

  /// The calls that queue something, since the last time this was asked.
  std::vector<std::string> take_calls();
  void note(std::string call);

  nccl::Backend backend(double timeout = 60) const;

  /// A fake without faults, and GPUs of their own for all ranks. Collective over MPI_COMM_WORLD.
  static FakeNccl& renew();

 private:
  std::mutex mutex_;
  std::vector<std::string> calls_;
};

}  // namespace syncnorm::testing
