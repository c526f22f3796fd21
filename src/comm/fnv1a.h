#pragma once

#include <cstdint>
#include <string_view>

namespace syncnorm {

/// Fowler-Noll-Vo 1a, 64 bits: the same on every machine, which std::hash does not promise.
inline uint64_t fnv1a(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const unsigned char byte : text) hash = (hash ^ byte) * 0x100000001b3u;
  return hash;
}

}  // namespace syncnorm
