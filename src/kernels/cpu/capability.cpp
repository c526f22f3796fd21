#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/cpu/loops.h"

namespace syncnorm::kernels::loops {

namespace baseline {
extern const Tables tables;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Tables tables;
}
namespace avx512 {
extern const Tables tables;
}
#endif

namespace {

/// Widest first.
std::vector<Capability> available() {
  std::vector<Capability> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const auto avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    found.push_back({"avx512", &avx512::tables});
  if (avx2) found.push_back({"avx2", &avx2::tables});
#endif
  found.push_back({"baseline", &baseline::tables});
  return found;
}

Capability choose() {
  const auto found = available();
  const char* wanted = std::getenv("SYNCNORM_CPU");
  if (wanted == nullptr || *wanted == '\0') return found.front();
  std::string names;
  for (const auto& capability : found) {
    if (capability.name == std::string(wanted)) return capability;
    names += (names.empty() ? "" : ", ") + std::string(capability.name);
  }
  throw std::invalid_argument("SYNCNORM_CPU is '" + std::string(wanted) +
                              "', this machine has: " + names);
}

}  // namespace

const Capability& capability() {
  static const Capability chosen = choose();
  return chosen;
}

}  // namespace syncnorm::kernels::loops
