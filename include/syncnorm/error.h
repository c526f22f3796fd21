#pragma once

#include <stdexcept>
#include <string>

namespace syncnorm {

/// A collective failed, timed out, or found the ranks in disagreement.
///
/// `what()` names this rank, the operation, the module, the communicator's sequence number and what
/// is known of the other ranks. The communicator that raised it is broken: every later call on it
/// raises again. It derives from std::exception so that the autograd engine carries it out of a
/// backward pass unchanged.
class CommunicationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace syncnorm
