#pragma once

#include <cstdint>
#include <string>

namespace syncnorm {

/// Name of a child for messages; a parent without a given name leaves it to name_modules.
inline std::string child_name(const std::string& parent, const std::string& child) {
  return parent.empty() ? std::string() : parent + "." + child;
}

/// Seeds of a module's children, different for each and for each parent's seed.
inline uint64_t child_seed(uint64_t parent, uint64_t child) {
  return (parent + 1) * 0x9e3779b97f4a7c15u + child;
}

}  // namespace syncnorm
