#pragma once

#include <ATen/ATen.h>
#include <mpi.h>

#include "syncnorm/communicator.h"

namespace syncnorm {

/// MPI's name for a dtype it can add; raises c10::Error for others.
MPI_Datatype mpi_datatype(at::ScalarType dtype);

MPI_Op mpi_op(ReduceOp op);

}  // namespace syncnorm
