// Compiled instead of the other files of this folder where there is no NCCL to build with.
#include <c10/util/Exception.h>

#include "syncnorm/nccl.h"

namespace syncnorm {

std::shared_ptr<Communicator> nccl_communicator(const std::shared_ptr<Communicator>&, c10::Device) {
  TORCH_CHECK(false,
              "nccl_communicator: syncnorm was built without NCCL. Build it where a CUDA toolkit, "
              "nccl.h and a LibTorch with CUDA are found, or use mpi_communicator, which stages "
              "CUDA tensors through the host");
}

}  // namespace syncnorm
