#include "common/program.h"

#include <c10/util/Exception.h>

#include <iostream>

#include "common/failure.h"
#include "common/stop.h"

namespace job {
namespace {

int run(const std::string& name, syncnorm::Environment& environment,
        const std::function<int(syncnorm::Environment&)>& body) {
  const int rank = environment.world()->rank();
  install_stop_handlers();
  try {
    return body(environment);
  } catch (const Failure& failure) {
    if (rank == 0) std::cerr << name << ": " << failure.what() << std::endl;
    return 1;
  } catch (const c10::Error& error) {
    std::cerr << name << ", rank " << rank << ": " << error.what_without_backtrace() << std::endl;
    throw;
  } catch (const std::exception& error) {
    std::cerr << name << ", rank " << rank << ": " << error.what() << std::endl;
    throw;
  }
}

}  // namespace

int run_program(const std::string& name, int& argc, char**& argv,
                const std::function<int(syncnorm::Environment&)>& body) {
  try {
    syncnorm::Environment environment(argc, argv);
    return run(name, environment, body);
  } catch (const c10::Error& error) {
    std::cerr << name << ": " << error.what_without_backtrace() << std::endl;
    return 1;
  } catch (const std::exception& error) {
    std::cerr << name << ": " << error.what() << std::endl;
    return 1;
  }
}

}  // namespace job
