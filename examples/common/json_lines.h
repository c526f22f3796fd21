#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace job {

/// A file of JSON lines, each written through at once.
class JsonLines {
 public:
  /// Opens `path` to append to.
  explicit JsonLines(const std::string& path);

  void write(const nlohmann::json& line);

 private:
  std::string path_;
  std::ofstream file_;
};

/// The lines of `path`, empty where there is no such file. A last line cut short by a crash is left
/// out.
std::vector<nlohmann::json> read_json_lines(const std::string& path);

/// Drops from `path` the lines whose `key` ("epoch", "step") is greater than `last`, so that a
/// resumed run does not log them twice. Lines without the key stay.
void forget_lines_after(const std::string& path, const std::string& key, int64_t last);

}  // namespace job
