#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "comm/fnv1a.h"

namespace syncnorm {

/// What a rank believes about a collective, as text "field=value;field=value;": hashed into the tag
/// that travels with statistics, and gathered whole to say which field differs.
class Signature {
 public:
  template <typename T>
  Signature& add(std::string_view field, T value) {
    text_.append(field).push_back('=');
    if constexpr (std::is_arithmetic_v<T>) {
      char digits[32];
      const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
      text_.append(digits, end);
    } else {
      text_.append(std::string_view(value));
    }
    text_.push_back(';');
    return *this;
  }

  /// Fields as text() gives them, `prefix` put before each name.
  Signature& append(const std::string& fields, const std::string& prefix = "") {
    for (size_t at = 0, end = 0; !prefix.empty() && at < fields.size(); at = end) {
      end = std::min(fields.find(';', at), fields.size() - 1) + 1;
      text_.append(prefix).append(fields, at, end - at);
    }
    if (prefix.empty()) text_ += fields;
    return *this;
  }

  const std::string& text() const { return text_; }

  /// 16-bit hash: its square summed over 2^20 ranks is still exact in double.
  uint16_t tag() const {
    const uint64_t hash = fnv1a(text_);
    return static_cast<uint16_t>(hash ^ (hash >> 16) ^ (hash >> 32) ^ (hash >> 48));
  }

 private:
  std::string text_;
};

/// "module: ranks 0 2 say bn1, rank 1 says bn2; eps: ...": the fields in which the ranks'
/// signatures differ, or "" where they all agree.
std::string describe_differences(const std::vector<std::string>& signatures);

}  // namespace syncnorm
