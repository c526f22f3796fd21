#include "figures.h"

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace segmentation {
namespace {

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

std::vector<int64_t> spread(const std::vector<int64_t>& indices, int64_t count) {
  const auto all = static_cast<int64_t>(indices.size());
  count = std::min(count, all);
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < count; ++i) chosen.push_back(indices[(2 * i + 1) * all / (2 * count)]);
  return chosen;
}

void write_predictions(const std::string& folder, const Dataset& dataset,
                       const std::vector<int64_t>& indices, const torch::Tensor& predicted) {
  const auto chosen = torch::tensor(indices, torch::kLong);
  const auto images = dataset.images.index_select(0, chosen);
  const auto labels = dataset.labels.index_select(0, chosen).unsqueeze(1);
  const auto planes = torch::cat({images, labels, predicted.unsqueeze(1)}, 1).contiguous();
  std::ofstream pixels(folder + "/predictions.bin", std::ios::binary);
  pixels.write(static_cast<const char*>(planes.data_ptr()), planes.numel());

  std::vector<std::string> names;
  for (const auto i : indices) names.push_back(dataset.names[i]);
  std::ofstream about(folder + "/predictions.json");
  about << nlohmann::json{{"shape", planes.sizes().vec()},
                          {"names", names},
                          {"classes", dataset.class_names},
                          {"colors", dataset.class_colors},
                          {"ignored", kIgnoredLabel}}
        << "\n";
  if (!pixels.flush() || !about.flush())
    throw std::runtime_error("cannot write predictions to " + folder);
}

void draw(const std::string& folder, const std::string& python, Console& console) {
  if (!console.speaks()) return;
  const auto command = quoted(python) + " " + quoted(SEGMENTATION_PLOTS) + " " + quoted(folder);
  std::string output;
  if (run(command, output) == 0) {
    console.line("drew " + output);
  } else {
    console.warn("no pictures were drawn (" + output + "); to draw them: " + command);
  }
}

}  // namespace segmentation
