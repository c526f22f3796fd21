#pragma once

#include <cstdint>
#include <cstring>

/// The half type of CUDA as the host emulates it, rounding as the device does.
struct __half {
  uint16_t bits;
};

inline float __half2float(__half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t exponent = value.bits >> 10 & 0x1f, fraction = value.bits & 0x3ff;
  float magnitude = 0;
  if (exponent == 0) {
    magnitude = static_cast<float>(fraction) * 0x1p-24f;
  } else {
    const uint32_t bits = (exponent == 0x1f ? 0xffu : exponent + 112) << 23 | fraction << 13;
    std::memcpy(&magnitude, &bits, sizeof bits);
  }
  uint32_t bits = 0;
  std::memcpy(&bits, &magnitude, sizeof bits);
  bits |= sign;
  float result = 0;
  std::memcpy(&result, &bits, sizeof bits);
  return result;
}

/// To nearest, ties to even; every NaN becomes the same one.
inline __half __float2half_rn(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {0x7fff};
  if (magnitude >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // 65520 and above
  // The fraction with its leading one, cut `shift` bits short of float's.
  const int exponent = static_cast<int>(magnitude >> 23);
  if (exponent < 102) return {sign};  // below half of the least subnormal
  const bool normal = exponent >= 113;
  const uint32_t whole = (magnitude & 0x7fffff) | 0x800000;
  const int shift = normal ? 13 : 126 - exponent;
  uint32_t result = whole >> shift;
  const uint32_t rest = whole & ((1u << shift) - 1), tie = 1u << (shift - 1);
  if (rest > tie || (rest == tie && (result & 1) != 0)) ++result;
  // A carry out of the fraction raises the exponent, as it should.
  if (normal) result += static_cast<uint32_t>(exponent - 113) << 10;
  return {static_cast<uint16_t>(sign | result)};
}
