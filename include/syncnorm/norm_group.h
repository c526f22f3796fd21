#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "syncnorm/named_module.h"

namespace syncnorm {

struct PreparedNorm;

/// A norm that a NormGroup takes: SyncBatchNorm, TensorParallelLayerNorm, TensorParallelRMSNorm.
class GroupableNorm {
 public:
  virtual ~GroupableNorm() = default;

 protected:
  GroupableNorm() = default;
  GroupableNorm(const GroupableNorm&) = default;
  GroupableNorm& operator=(const GroupableNorm&) = default;

 private:
  friend class NormGroup;
  /// Checks the call, without communicating; what is left is the exchange and to apply.
  virtual PreparedNorm prepare(const torch::Tensor& input, const torch::Tensor& residual) = 0;
};

/// Independent norms whose statistics travel together: of parallel branches, of queries and keys.
/// None may need another's output. Where the norms one by one cost a collective each forward and
/// each backward, the group costs one and one, with the same payload; results are those of the
/// norms alone, running statistics and their freezing included.
///
///     NormGroup norms({branch_a_norm, branch_b_norm}, "branches");
///     auto y = norms.forward({a, b});
///
/// The group is no module: it keeps the norms alive, which stay registered where they are. Make it
/// in reset() of the module that owns them, so that a clone has a group of its own; and after
/// converting or reverting a module tree, which replaces norms (and which refuses while a group
/// still holds them).
///
/// Norms that need no communication (batch norm in evaluation with running statistics) are applied
/// at once, and the others share; with none of those, nobody communicates. All ranks must have the
/// same norms in the same order and modes. Backward waits for the gradients of all outputs that the
/// loss uses, on every rank; an output that it does not use counts with a gradient of zero, so that
/// the parameters of its norm get zeros.
class NormGroup : public NamedModule {
 public:
  /// A norm's holder (SyncBatchNorm, ...) or a shared_ptr to the module.
  class Member {
   public:
    template <typename Impl, typename = std::enable_if_t<std::is_base_of_v<GroupableNorm, Impl>>>
    /* implicit */ Member(const torch::nn::ModuleHolder<Impl>& holder) : Member(holder.ptr()) {}
    template <typename Impl, typename = std::enable_if_t<std::is_base_of_v<GroupableNorm, Impl>>>
    /* implicit */ Member(const std::shared_ptr<Impl>& norm) : module_(norm), norm_(norm.get()) {}

   private:
    friend class NormGroup;
    std::shared_ptr<torch::nn::Module> module_;
    GroupableNorm* norm_;
  };

  /// `name` appears in error messages, the same on all ranks; empty: "NormGroup-k". Raises
  /// c10::Error for no norms, a null one, or one that keeps running statistics given twice.
  explicit NormGroup(std::vector<Member> norms, std::string name = "");

  size_t size() const { return norms_.size(); }

  /// Input i goes through norm i; the outputs in that order. Raises c10::Error before any
  /// communication for a wrong number of inputs, for what a norm itself refuses, and where the
  /// norms that communicate differ in communicator (the same object) or device;
  /// CommunicationError where ranks disagree, naming the norm.
  std::vector<torch::Tensor> forward(const std::vector<torch::Tensor>& inputs);

  /// As each norm takes its residual: SyncBatchNorm after the norm, the others before it. Residuals
  /// may be undefined where there is none. Pairs of output and, where a residual came before, the
  /// sum that was normalised.
  std::vector<std::pair<torch::Tensor, torch::Tensor>> forward_residual(
      const std::vector<torch::Tensor>& inputs, const std::vector<torch::Tensor>& residuals);

 private:
  std::vector<Member> norms_;
};

}  // namespace syncnorm
