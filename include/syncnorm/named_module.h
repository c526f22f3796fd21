#pragma once

#include <string>

namespace syncnorm {

/// The name under which a module appears in error messages and tags, the same on all ranks.
///
/// Without a given one it is "Kind-k" for the k-th of its kind made in this process, so that ranks
/// that build their models alike agree; name_modules gives the path in the model.
class NamedModule {
 public:
  virtual ~NamedModule() = default;
  const std::string& display_name() const { return name_.empty() ? default_name_ : name_; }
  bool has_given_name() const { return !name_.empty(); }
  void set_display_name(std::string name) { name_ = std::move(name); }

 protected:
  NamedModule(const std::string& kind, std::string given_name);

 private:
  std::string name_;
  std::string default_name_;
};

/// "Kind-k", k counting up for each kind.
std::string next_default_name(const std::string& kind);

}  // namespace syncnorm
