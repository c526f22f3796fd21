#pragma once

#include <functional>
#include <string>

#include "syncnorm/environment.h"

namespace job {

/// main() of a job: runs `body`, which gives the exit status, in an Environment, with handlers that
/// turn signals into a wish to stop. A Failure, known to all ranks, is printed by rank 0 and makes
/// the status 1; any other exception is printed by its rank, and the Environment ends the others.
int run_program(const std::string& name, int& argc, char**& argv,
                const std::function<int(syncnorm::Environment&)>& body);

}  // namespace job
