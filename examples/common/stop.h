#pragma once

namespace job {

/// Makes SIGTERM, SIGINT and SIGUSR1 (which mpirun passes on as they are) a wish to stop at the
/// next step instead of an end at once.
void install_stop_handlers();

/// Whether this process received one of them.
bool stop_requested();

}  // namespace job
