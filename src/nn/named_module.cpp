#include "syncnorm/named_module.h"

#include <map>
#include <mutex>

namespace syncnorm {

std::string next_default_name(const std::string& kind) {
  static std::mutex mutex;
  static std::map<std::string, int64_t> made;
  const std::lock_guard<std::mutex> lock(mutex);
  return kind + "-" + std::to_string(++made[kind]);
}

NamedModule::NamedModule(const std::string& kind, std::string given_name)
    : name_(std::move(given_name)), default_name_(name_.empty() ? next_default_name(kind) : "") {}

}  // namespace syncnorm
