#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace syncnorm {

/// What a rank believes about a collective, as text "field=value;field=value;": hashed into the tag
/// that travels with statistics, and gathered whole to say which field differs.
class Signature {
 public:
  Signature() { text_.reserve(kUsual); }

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

  const std::string& text() const& { return text_; }
  std::string text() && { return std::move(text_); }

  /// 16-bit hash: its square summed over 2^20 ranks is still exact in double.
  uint16_t tag() const { return static_cast<uint16_t>(hash_of(text_) >> 48); }

 private:
  static constexpr size_t kUsual = 256;  // bytes of text

  /// Eight bytes at a time, since every collective of a norm takes one. Every byte reaches the
  /// upper bits, the last ones no others.
  static uint64_t hash_of(std::string_view text) {
    uint64_t hash = text.size();
    for (size_t at = 0; at < text.size(); at += sizeof hash) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + at, std::min(sizeof word, text.size() - at));
      hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    return hash;
  }

  std::string text_;
};

/// "module: ranks 0 2 say bn1, rank 1 says bn2; eps: ...": the fields in which the ranks'
/// signatures differ, or "" where they all agree.
std::string describe_differences(const std::vector<std::string>& signatures);

}  // namespace syncnorm
