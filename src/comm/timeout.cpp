#include "comm/timeout.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cmath>
#include <cstdlib>

namespace syncnorm {
namespace {
std::atomic<int> abandoned{0};
}

void note_abandoned_operation() { ++abandoned; }
void note_late_completion() { --abandoned; }
bool operation_abandoned() { return abandoned > 0; }

double timeout_seconds() {
  static const double seconds = [] {
    constexpr double kDefault = 600;
    const char* text = std::getenv("SYNCNORM_TIMEOUT");
    if (text == nullptr || *text == '\0') return kDefault;
    char* end = nullptr;
    const double value = std::strtod(text, &end);
    TORCH_CHECK(*end == '\0' && std::isfinite(value) && value > 0,
                "SYNCNORM_TIMEOUT must be a positive number of seconds, got '", text, "'");
    return value;
  }();
  return seconds;
}

}  // namespace syncnorm
