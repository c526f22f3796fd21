#include "nn/module_registry.h"

namespace syncnorm {
namespace {

/// Only names the specialization below.
struct RegistryAccess;

}  // namespace
}  // namespace syncnorm

// Module has no public way to exchange a registered tensor or to look at a child without copying
// its owner, but befriends every Cloneable.
template <>
class torch::nn::Cloneable<syncnorm::RegistryAccess> {
 public:
  static auto& parameters(Module& module) { return module.parameters_; }
  static auto& buffers(Module& module) { return module.buffers_; }
  static auto& children(Module& module) { return module.children_; }
};

namespace syncnorm {
namespace {

using Registry = torch::nn::Cloneable<RegistryAccess>;
using torch::nn::Module;

/// Calls `found(held)` for the second reference that container `parent` keeps to `child`, if it
/// does: a shared_ptr or an AnyModule.
template <typename Found>
bool with_container_entry(Module& parent, const Module* child, Found found) {
  if (auto* list = parent.as<torch::nn::ModuleListImpl>()) {
    for (auto& entry : *list) {
      if (entry.get() == child) return found(entry), true;
    }
  } else if (auto* dict = parent.as<torch::nn::ModuleDictImpl>()) {
    for (auto& entry : *dict) {
      if (entry.value().get() == child) return found(entry.value()), true;
    }
  } else if (auto* sequential = parent.as<torch::nn::SequentialImpl>()) {
    for (auto& entry : *sequential) {
      if (entry.ptr().get() == child) return found(entry), true;
    }
  }
  return false;
}

}  // namespace

const std::shared_ptr<Module>& ChildSlot::child() const {
  return Registry::children(*parent_)[name_];
}

long ChildSlot::owners() const {
  const auto ignore = [](auto&) {};
  return with_container_entry(*parent_, child().get(), ignore) ? 2 : 1;
}

void ChildSlot::replace(const Replacement& replacement) {
  const auto exchange = [&](auto& held) {
    if constexpr (std::is_same_v<std::decay_t<decltype(held)>, torch::nn::AnyModule>) {
      held = replacement.callable();
    } else {
      held = replacement.module();
    }
  };
  with_container_entry(*parent_, child().get(), exchange);
  Registry::children(*parent_)[name_] = replacement.module();
}

std::vector<ChildSlot> child_slots(Module& module) {
  std::vector<ChildSlot> slots;
  for (const auto& item : Registry::children(module)) slots.emplace_back(module, item.key());
  return slots;
}

void replace_parameter(Module& module, const std::string& name, const torch::Tensor& tensor) {
  Registry::parameters(module)[name] = tensor;
}

void replace_buffer(Module& module, const std::string& name, const torch::Tensor& tensor) {
  Registry::buffers(module)[name] = tensor;
}

}  // namespace syncnorm
