#pragma once

namespace syncnorm {

/// Whether this MPI's blocking calls take device memory, as far as it tells.
bool mpi_takes_device_memory();

}  // namespace syncnorm
