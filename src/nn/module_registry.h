#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace syncnorm {

/// A module to put in place of another, with the type that a Sequential needs to call it.
class Replacement {
 public:
  template <typename Impl>
  explicit Replacement(std::shared_ptr<Impl> module)
      : module_(module), callable_(std::move(module)) {}

  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  const torch::nn::AnyModule& callable() const { return callable_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  torch::nn::AnyModule callable_;
};

/// A place where a module registers a child. Sequential, ModuleList and ModuleDict hold their
/// children a second time, for calling; replace() changes both.
class ChildSlot {
 public:
  ChildSlot(torch::nn::Module& parent, std::string name)
      : parent_(&parent), name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  /// The registry's own pointer. Beware: a copy of it is one more owner.
  const std::shared_ptr<torch::nn::Module>& child() const;
  /// How many owners of the child this slot is.
  long owners() const;
  void replace(const Replacement& replacement);

 private:
  torch::nn::Module* parent_;
  std::string name_;
};

/// All children of `module`, in order of registration.
std::vector<ChildSlot> child_slots(torch::nn::Module& module);

/// Lets the registry entry of `module` refer to `tensor` itself.
void replace_parameter(torch::nn::Module& module, const std::string& name,
                       const torch::Tensor& tensor);
void replace_buffer(torch::nn::Module& module, const std::string& name,
                    const torch::Tensor& tensor);

}  // namespace syncnorm
