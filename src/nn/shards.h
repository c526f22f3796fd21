#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace syncnorm {

/// `sizes`, or balanced ones where they are empty. Raises c10::Error naming `who` and `what` unless
/// they are one non-negative number for each of `ranks` that add up to `total`.
std::vector<int64_t> sizes_or_balanced(std::vector<int64_t> sizes, int64_t total, int ranks,
                                       const std::string& who, const char* what);

}  // namespace syncnorm
