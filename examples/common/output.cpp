#include "common/output.h"

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <stdexcept>

namespace job {
namespace {

namespace fs = std::filesystem;

std::string next_free_folder() {
  for (int number = 1;; ++number) {
    const auto folder = "runs/" + std::to_string(number);
    if (!fs::exists(folder)) return folder;
  }
}

std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

/// Runs `command` in a shell; returns its exit status and puts what it printed into `output`.
int run(const std::string& command, std::string& output) {
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return -1;
  std::array<char, 256> part{};
  while (std::fgets(part.data(), part.size(), pipe) != nullptr) output += part.data();
  const int status = pclose(pipe);
  while (!output.empty() && output.back() == '\n') output.pop_back();
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

void prepare_folder(Output& output, const std::string& checkpoint,
                    const std::vector<std::string>& leftovers) {
  auto& folder = output.folder;
  if (folder.empty()) folder = next_free_folder();
  if (!output.resume && !output.overwrite && fs::exists(fs::path(folder) / checkpoint)) {
    throw std::runtime_error(folder +
                             " holds an earlier run. --resume goes on with it, --overwrite "
                             "replaces it, another --out keeps it.");
  }
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw std::runtime_error("cannot make the folder " + folder + ": " + error.message());
  if (output.resume) return;
  for (const auto& name : leftovers) fs::remove_all(fs::path(folder) / name);
}

void draw(const Output& output, const std::string& script, Console& console) {
  if (output.no_plots || !console.speaks()) return;
  const auto command = quoted(output.python) + " " + quoted(script) + " " + quoted(output.folder);
  std::string said;
  if (run(command, said) == 0) {
    console.line("drew " + said);
  } else {
    console.warn("no pictures were drawn (" + said + "); to draw them: " + command);
  }
}

}  // namespace job
