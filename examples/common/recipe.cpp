#include "common/recipe.h"

#include <stdexcept>

namespace job {

nlohmann::json merge_recipes(const nlohmann::json& current, const nlohmann::json& saved,
                             const std::set<std::string>& given,
                             const std::set<std::string>& free) {
  auto merged = saved;
  std::string differing;
  for (const auto& [flag, value] : current.items()) {
    if (given.count(flag) == 0 || saved.at(flag) == value) continue;
    merged[flag] = value;
    if (free.count(flag) > 0) continue;
    if (!differing.empty()) differing += ", ";
    differing += "--" + flag + " " + value.dump() + " (checkpoint: " + saved.at(flag).dump() + ")";
  }
  if (!differing.empty()) {
    throw std::runtime_error("cannot resume with " + differing +
                             ". Leave these flags out, or start a new run with another --out.");
  }
  return merged;
}

}  // namespace job
