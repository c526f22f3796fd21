#include "common/flags.h"

#include <iostream>
#include <sstream>

namespace job {

void add_output_flags(CLI::App& app, Output& output, const std::string& files) {
  Group group(app, "Output");
  group.option("--out", output.folder, "DIR",
               "Folder for " + files + " (default: the next free runs/N)");
  group.flag("--resume", output.resume,
             "Go on from the checkpoint in --out, on any number of ranks; flags not given are the "
             "checkpoint's");
  group.flag("--overwrite", output.overwrite, "Replace what an earlier run left in --out");
  group
      .option("--progress", output.progress, "NAME",
              "bar, lines, or auto: a bar where the output is a terminal")
      ->check(one_of({"auto", "bar", "lines"}));
  group.flag("--no-plots", output.no_plots, "Draw no pictures at the end");
  group.option("--python", output.python, "FILE", "Python with matplotlib that draws them");
}

void check_output_flags(const Output& output, const std::set<std::string>& given) {
  if (output.no_plots) refuse(given, "python", "and --no-plots contradict each other");
  if (output.resume) refuse(given, "overwrite", "and --resume contradict each other");
  if (output.resume && output.folder.empty())
    throw CLI::ValidationError("--resume", "needs --out, the folder of the run to go on with");
}

void add_compute_flags(CLI::App& app, std::string& device, std::string& precision) {
  Group group(app, "Computing");
  group
      .option(
          "--device", device, "NAME",
          "cpu, cuda (a GPU for each rank, by its place on its node), or auto: cuda where every "
          "rank has a GPU")
      ->check(one_of({"auto", "cpu", "cuda"}));
  group
      .option("--precision", precision, "NAME",
              "float, or bfloat16 for convolutions and products; parameters, statistics and loss "
              "stay float")
      ->check(one_of({"float", "bfloat16"}));
}

void refuse(const std::set<std::string>& given, const std::string& flag, const std::string& why) {
  if (given.count(flag) > 0) throw CLI::ValidationError("--" + flag, why);
}

std::set<std::string> given_options(const CLI::App& app) {
  std::set<std::string> given;
  for (const auto* option : app.get_options()) {
    if (option->count() > 0) given.insert(option->get_name(false, false).substr(2));
  }
  return given;
}

bool parse(CLI::App& app, int argc, char** argv, bool speak, int& status,
           const std::function<void()>& check) {
  try {
    app.parse(argc, argv);
    check();
    return true;
  } catch (const CLI::ParseError& error) {
    std::ostringstream out, err;
    status = app.exit(error, out, err);
    if (speak) std::cout << out.str() << std::flush;
    if (speak) std::cerr << err.str() << std::flush;
    return false;
  }
}

}  // namespace job
