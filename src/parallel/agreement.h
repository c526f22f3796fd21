#pragma once

#include <functional>
#include <string>

#include "syncnorm/communicator.h"

namespace syncnorm {

/// Runs `body` on every rank and goes on only where it succeeded on all: an exception on any rank
/// becomes a c10::Error on each, which tells what went wrong where. One all-reduce of three words;
/// a second exchange tells the messages after a failure. `body` does not communicate; the hash that
/// it returns, of what all ranks should have alike, must agree.
void agree(Communicator& comm, const std::string& who, const std::function<uint64_t()>& body);

}  // namespace syncnorm
