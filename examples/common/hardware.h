#pragma once

#include <string>

#include "syncnorm/environment.h"

namespace job {

/// "3 steps", "1 step".
std::string counted(int64_t count, const std::string& what);

/// "2 ranks on 1 node, 1 thread each; AMD EPYC, 2 cores; cpu; LibTorch 2.11.0", of a job that
/// computes on `device`. Collective.
std::string hardware(const syncnorm::Environment& environment, c10::Device device);

}  // namespace job
