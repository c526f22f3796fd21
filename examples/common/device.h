#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>

#include "common/console.h"
#include "syncnorm/environment.h"

namespace job {

/// Where the ranks of a job compute, and what carries the tensors there from one to another.
struct Placement {
  c10::Device device;
  std::shared_ptr<syncnorm::Communicator> comm;  ///< over NCCL between GPUs, else the world
};

/// Places the job as --device, `wish`, says: cpu; cuda, each rank on the GPU of its place on its
/// node; or auto, the GPUs where every rank has one. Makes the GPU this thread's current device.
/// Where NCCL cannot be had, rank 0 says why and MPI carries the tensors. Raises Failure on all
/// ranks where a GPU is asked for that some rank lacks. Collective.
Placement place(const syncnorm::Environment& environment, const std::string& wish,
                Console& console);

/// The device of this rank that `wish` comes to, where `own` is what environment.device() found.
/// Collective; otherwise as place().
c10::Device choose_device(syncnorm::Communicator& world, c10::Device own, const std::string& wish,
                          Console& console);

/// `batch`, a tensor of the host, on `device`. To a GPU it goes from pinned memory and may still be
/// on its way, in the order of the current stream.
at::Tensor to_device(const at::Tensor& batch, c10::Device device);

}  // namespace job
