#include <iostream>

#include "failure.h"
#include "job.h"
#include "stop.h"

namespace {

int run(syncnorm::Environment& environment, int argc, char** argv) {
  using namespace segmentation;
  const bool root = environment.world()->rank() == 0;
  int status = 0;
  auto options = parse_options(argc, argv, root, status);
  if (!options) return status;
  install_stop_handlers();
  Job job{environment, *options, Console(root, options->progress)};
  try {
    return job.options.compare ? compare(job) : train(job);
  } catch (const Failure& failure) {
    job.console.warn(failure.what());
    return 1;
  } catch (const std::exception& error) {
    // Known to this rank alone: the Environment ends the others as this leaves it.
    std::cerr << "segmentation, rank " << environment.world()->rank() << ": " << error.what()
              << std::endl;
    throw;
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    syncnorm::Environment environment(argc, argv);
    return run(environment, argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "segmentation: " << error.what() << std::endl;
    return 1;
  }
}
