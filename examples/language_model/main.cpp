#include "common/program.h"
#include "job.h"

int main(int argc, char** argv) {
  return job::run_program("language_model", argc, argv, [&](syncnorm::Environment& environment) {
    using namespace language_model;
    const bool root = environment.world()->rank() == 0;
    int status = 0;
    auto options = parse_options(argc, argv, root, status);
    if (!options) return status;
    Console console("language_model", root, options->output.progress);
    Job job{environment, *options, console, place(environment, options->device, console)};
    return job.options.sample ? sample(job) : train(job);
  });
}
