#pragma once

#include <functional>
#include <stdexcept>
#include <string>

#include "syncnorm/communicator.h"

namespace job {

/// A mistake of the user's that every rank knows of: all ranks throw it together, rank 0 prints it,
/// the job ends with status 1.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Runs `action` here; where it throws on any rank, every rank throws the lowest such rank's
/// message as a Failure. Collective.
void agree(syncnorm::Communicator& comm, const std::function<void()>& action);

/// `text` of rank `root`, on every rank. Collective.
std::string broadcast_text(syncnorm::Communicator& comm, const std::string& text, int root = 0);

}  // namespace job
