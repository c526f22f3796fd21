#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "kernels/kernels.h"

/// Norms whose exchange the host does not wait for. The kernel before it writes what travels in
/// front of the sums; the kernel after it checks what came back, finishes the statistics and
/// applies them. Between the two only the all-reduce is queued.
namespace syncnorm::kernels {

/// Words written in front of the sums.
struct Front {
  at::Tensor words;            ///< double, where `values` go; undefined: nothing to write
  std::vector<double> values;  ///< at most six
  at::Tensor center_hash;      ///< double [2]; undefined: not wanted
};

/// How the kernel after an exchange tells whether the ranks meant the same thing.
struct Outcome {
  at::Tensor verdict;  ///< int32 [1], host memory that the device writes, a cuda::Verdict
  at::Tensor tags;     ///< double [2], summed over the ranks
  double tag = 0;      ///< this rank's
  double ranks = 1;
  at::Tensor center_hash;  ///< double [2], summed; or undefined
  double total_values = 0;
  bool refuses_single_value = false;
};

/// Statistics on their way: what `finish_and_apply` makes them of.
struct Arriving {
  at::Tensor sums;    ///< double [layout.sums(), slots], of all ranks
  at::Tensor center;  ///< double [slots] or undefined
  SlotCount count;
  Precision precision;
  at::Tensor running_mean, running_var;  ///< contiguous; updated where defined
  double momentum = 0;                   ///< negative: the cumulative average
  at::Tensor batches;                    ///< int64 [], one more; or undefined
  Outcome outcome;
  std::string exchange;  ///< that brought them, for messages
};

class DeferredKernels {
 public:
  virtual ~DeferredKernels() = default;

  /// KernelSet::moments, or add_and_moments where there is a residual. Returns the centers it
  /// took: `running_mean` in double, zero where not finite; undefined where that is.
  virtual at::Tensor moments(const at::Tensor& x, const at::Tensor& residual,
                             const NormInput& input, const NormLayout& layout,
                             const at::Tensor& running_mean, const at::Tensor& sums,
                             const Front& front) const = 0;

  /// Writes norm.statistics, running statistics and y.
  virtual void finish_and_apply(const Norm& norm, const Arriving& arriving,
                                const at::Tensor& y) const = 0;

  /// KernelSet::backward_sums. `dbias` and `dweight`, like the parameters, take the sums that
  /// `of_affine` would; each may be undefined.
  virtual void backward_sums(const Norm& norm, const at::Tensor& dy, const at::Tensor& of_slots,
                             const at::Tensor& of_affine, const at::Tensor& dbias,
                             const at::Tensor& dweight, const Front& front) const = 0;

  virtual void backward_apply(const Norm& norm, const at::Tensor& dy, const at::Tensor& sums,
                              const SlotCount& count, const BackwardOutputs& outputs,
                              const Outcome& outcome) const = 0;

  /// Whether the device's current stream records a graph: then what is queued runs again and
  /// again, and its verdicts are written each time.
  virtual bool capturing(c10::Device device) const = 0;
};

}  // namespace syncnorm::kernels
