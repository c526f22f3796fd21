#include "common/device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <unistd.h>

#include <array>
#include <stdexcept>

#include "common/failure.h"
#include "syncnorm/nccl.h"

namespace job {
namespace {

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown host";
}

}  // namespace

c10::Device choose_device(syncnorm::Communicator& world, c10::Device own, const std::string& wish,
                          Console& console) {
  if (wish == "cpu") return c10::kCPU;
  if (wish == "cuda") {
    agree(world, [&] {
      if (own.is_cuda()) return;
      throw std::runtime_error("--device cuda: rank " + std::to_string(world.rank()) + " on " +
                               host_name() +
                               " has no GPU that LibTorch can use; look at nvidia-smi and "
                               "CUDA_VISIBLE_DEVICES there, or leave --device out");
    });
    return own;
  }
  // Tensors on both kinds of device would meet in one collective, so it is all ranks or none.
  const auto with_gpu = at::full({1}, int64_t{own.is_cuda()});
  world.all_reduce(with_gpu);
  const auto count = with_gpu.item<int64_t>();
  if (count == world.size()) return own;
  if (count > 0) {
    console.warn(format("only %ld of %d ranks have a GPU, so all compute on their CPUs",
                        static_cast<long>(count), world.size()));
  }
  return c10::kCPU;
}

Placement place(const syncnorm::Environment& environment, const std::string& wish,
                Console& console) {
  const auto& world = environment.world();
  Placement placement{choose_device(*world, environment.device(), wish, console), world};
  if (!placement.device.is_cuda()) return placement;
  // What names no device, pinned memory for one, would else open a context on GPU 0 from every
  // rank.
  c10::impl::getDeviceGuardImpl(c10::kCUDA)->setDevice(placement.device);
  try {
    agree(*world, [&] { placement.comm = nccl_communicator(world, placement.device); });
  } catch (const Failure& failure) {
    placement.comm = world;
    console.warn(std::string("MPI carries the tensors between the GPUs, which is slower: ") +
                 failure.what());
  }
  return placement;
}

at::Tensor to_device(const at::Tensor& batch, c10::Device device) {
  if (!device.is_cuda()) return batch.to(device);
  return batch.pin_memory().to(device, batch.scalar_type(), /*non_blocking=*/true);
}

}  // namespace job
