#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>

#include "syncnorm/communicator.h"

namespace syncnorm {

/// What kernels find out about exchanges that the host did not wait for: words in host memory that
/// the device writes, each with what to say if it comes out badly. Threads may use them together.
class Verdicts {
 public:
  /// A word, int32 [1], for the exchange `operation` of `module` on `comm`. Kept for good where
  /// `kept`: a graph writes it at every replay.
  static at::Tensor open(const std::shared_ptr<Communicator>& comm, std::string operation,
                         std::string module, c10::Device device, bool kept);

  /// Raises what kernels have found on `comm` so far. Does not wait.
  static void raise_found(const std::shared_ptr<Communicator>& comm);

  /// Whether some, other than kept ones, are yet to be written.
  static bool pending(const std::shared_ptr<Communicator>& comm);
};

}  // namespace syncnorm
