#pragma once

#include <string>
#include <utility>
#include <vector>

#include "syncnorm/data_parallel.h"

namespace syncnorm {

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// Checks that all ranks hold parameters and buffers of the same names, shapes, strides and dtypes
/// in the same order, want gradients of the same ones, and reduce them with the same options.
/// Raises c10::Error on every rank, naming the first difference, otherwise. Collective.
void verify_replicas(Communicator& comm, const NamedTensors& parameters,
                     const NamedTensors& buffers, const DistributedDataParallelOptions& options);

}  // namespace syncnorm
