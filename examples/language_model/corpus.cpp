#include "corpus.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "common/console.h"

namespace language_model {
namespace {

namespace fs = std::filesystem;

/// A tragedy, a comedy and a history, 7 % of the text.
const std::set<std::string> kHeldOut = {"macbeth", "twelfth_night", "richard_ii"};

std::string read_file(const fs::path& path) {
  std::ostringstream text;
  std::ifstream file(path, std::ios::binary);
  if (!fs::is_regular_file(path) || !file) throw std::runtime_error("cannot read " + path.string());
  text << file.rdbuf();
  return text.str();
}

std::string size_text(const std::string& text) {
  const auto bytes = static_cast<double>(text.size());
  return bytes < 1e5 ? job::format("%.1f kB", bytes / 1e3) : job::format("%.2f MB", bytes / 1e6);
}

Corpus read_plays(const std::string& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".txt") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  Corpus corpus;
  size_t held_out = 0;
  for (const auto& file : files) {
    const bool hold = kHeldOut.count(file.stem().string()) > 0;
    held_out += hold;
    (hold ? corpus.held_out : corpus.training) += read_file(file) + "\n\n\n";
  }
  if (held_out < kHeldOut.size() || files.size() == held_out) {
    throw std::runtime_error("the plays are not in " + folder +
                             ": launch/setup brings them, --data DIR names another folder, --text "
                             "FILE takes a text of yours");
  }
  corpus.description = std::to_string(files.size() - held_out) + " plays to learn from (" +
                       size_text(corpus.training) +
                       "); held out whole: Macbeth, Richard II, Twelfth Night (" +
                       size_text(corpus.held_out) + ")";
  return corpus;
}

Corpus read_text(const std::string& path) {
  const auto text = read_file(path);
  if (text.empty()) throw std::runtime_error("--text " + path + " is empty");
  auto cut = text.size() - text.size() / 10;
  const auto line_end = text.find('\n', cut);
  if (line_end != std::string::npos && line_end - cut < text.size() / 100) cut = line_end + 1;
  Corpus corpus{text.substr(0, cut), text.substr(cut), ""};
  corpus.description = path + ", " + size_text(corpus.training) +
                       " to learn from; held out: the last " + size_text(corpus.held_out);
  return corpus;
}

}  // namespace

Corpus read_corpus(const Recipe& recipe) {
  return recipe.text.empty() ? read_plays(recipe.data) : read_text(recipe.text);
}

}  // namespace language_model
