#pragma once

#include <cstdint>
#include <cstring>

/// The bfloat16 type of CUDA as the host emulates it, rounding as the device does.
struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result = 0;
  std::memcpy(&result, &bits, sizeof bits);
  return result;
}

/// To nearest, ties to even; every NaN becomes the same one.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
