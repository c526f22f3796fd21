#include "common/json_lines.h"

#include <filesystem>
#include <stdexcept>

namespace job {

JsonLines::JsonLines(const std::string& path) : path_(path), file_(path, std::ios::app) {
  if (!file_) throw std::runtime_error("cannot write " + path);
}

void JsonLines::write(const nlohmann::json& line) {
  file_ << line << std::endl;
  if (!file_) throw std::runtime_error("cannot write " + path_ + " (disk full?)");
}

std::vector<nlohmann::json> read_json_lines(const std::string& path) {
  std::vector<nlohmann::json> lines;
  std::ifstream file(path);
  for (std::string text; std::getline(file, text);) {
    auto line = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!line.is_discarded()) lines.push_back(std::move(line));
  }
  return lines;
}

void forget_lines_after(const std::string& path, const std::string& key, int64_t last) {
  const auto lines = read_json_lines(path);
  const auto beside = path + ".new";
  {
    std::ofstream file(beside);
    for (const auto& line : lines) {
      if (line.value(key, last) <= last) file << line << "\n";
    }
    if (!file.flush()) throw std::runtime_error("cannot write " + beside);
  }
  std::filesystem::rename(beside, path);
}

}  // namespace job
