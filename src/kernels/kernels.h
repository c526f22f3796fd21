#pragma once

#include <ATen/ATen.h>

#include "kernels/layout.h"

namespace syncnorm::kernels {

/// What follows from the sums of all ranks, double [3, slots]: mean (zero where the norm is not
/// centered), biased variance (then the mean square), and rstd = 1/sqrt(variance + eps).
enum StatisticsRow : int64_t { kMean, kVariance, kRstd, kStatisticsRows };

/// One norm of one input: y = activation(xhat * weight + bias + residual), where
/// xhat = (x - mean)*rstd.
struct Norm {
  NormInput input;
  const NormLayout& layout;
  at::Tensor statistics;  ///< see StatisticsRow
  at::Tensor weight;      ///< as the layout says, or undefined
  at::Tensor bias;        ///< a bias comes with a weight only
  at::Tensor residual;    ///< dense like the input, or undefined; not by column
  bool relu = false;      ///< max(., 0), NaN stays; not by column
  at::Tensor output;      ///< backward with relu and residual: y
};

/// How far the digits of a variance must reach: the sums about `center` lost too many where
/// (mean - center)^2 > ratio*(variance + floor).
struct Precision {
  double eps = 0;
  double floor = 0;
  double ratio = 0;
};

/// What the backward leaves, undefined where not needed: dx or dresidual, if not both, is.
struct BackwardOutputs {
  at::Tensor dx;         ///< dense like the input
  at::Tensor dresidual;  ///< likewise: the gradient that passes the activation
  at::Tensor extra;      ///< read: added to dx; by column only
};

class DeferredKernels;

/// The passes over memory that norms consist of, and the arithmetic of slots between them. Inputs
/// are dense; float, double, half or bfloat16, computed in float or wider; sums across slots are
/// double. Implementations are stateless and give the same bits from run to run, whatever the
/// number of threads.
class KernelSet {
 public:
  virtual ~KernelSet() = default;

  /// A running mean as a center to sum about: double, zero where it is not finite.
  virtual at::Tensor center(const at::Tensor& running_mean) const = 0;

  /// Writes sum(x - center), unless not centered, and sum((x - center)^2) of each slot to `sums`,
  /// double [layout.sums(), slots]. `center`: double [slots], undefined for zero.
  virtual void moments(const NormInput& x, const NormLayout& layout, const at::Tensor& center,
                       const at::Tensor& sums) const = 0;

  /// The same of x + residual, which is written to sum.data, rounded to its dtype, in the same
  /// pass.
  virtual void add_and_moments(const at::Tensor& x, const at::Tensor& residual,
                               const NormInput& sum, const NormLayout& layout,
                               const at::Tensor& center, const at::Tensor& sums) const = 0;

  /// Statistics from the ranks' `sums` about `center`; true where digits were lost.
  virtual bool finish(const at::Tensor& sums, const NormLayout& layout, const at::Tensor& center,
                      const SlotCount& count, const Precision& precision,
                      const at::Tensor& statistics) const = 0;

  /// running = running*(1 - momentum) + latest*momentum, the unbiased variance for running_var, in
  /// place; either may be undefined.
  virtual void update_running(const at::Tensor& statistics, double count, double momentum,
                              const at::Tensor& running_mean,
                              const at::Tensor& running_var) const = 0;

  /// y: dense like the input.
  virtual void apply(const Norm& norm, const at::Tensor& y) const = 0;

  /// With g the gradient that passes the activation, writes sum(g*weight), unless not centered, and
  /// sum(g*weight*xhat) of each slot to `of_slots`, double [layout.sums(), slots], and sum(g),
  /// sum(g*xhat) of each element of bias and weight to `of_affine`, double layout.affine_shape(),
  /// unless that is undefined. Those of a bias are for norms that have one, zero or right
  /// otherwise.
  virtual void backward_sums(const Norm& norm, const at::Tensor& dy, const at::Tensor& of_slots,
                             const at::Tensor& of_affine) const = 0;

  /// A row of sums of affine parameters as gradient of `parameter`, in its shape and dtype.
  virtual at::Tensor affine_gradient(const at::Tensor& of_affine, int64_t row,
                                     const at::Tensor& parameter) const = 0;

  /// dx = rstd*(g*weight - mean(g*weight) - xhat*mean(g*weight*xhat)), the first mean left out
  /// where not centered. `sums`: of_slots summed over the ranks.
  virtual void backward_apply(const Norm& norm, const at::Tensor& dy, const at::Tensor& sums,
                              const SlotCount& count, const BackwardOutputs& outputs) const = 0;

  /// The same work in an order that never waits for the device; null where there is no device.
  virtual const DeferredKernels* deferred() const { return nullptr; }
};

/// Plain ATen operations in double, for any device: what the others are compared with.
const KernelSet& reference_kernels();

/// Vectorised loops for the CPU.
const KernelSet& cpu_kernels();

/// Null where the library was built without CUDA kernels.
const KernelSet* cuda_kernels();

/// The set for tensors on `device`. SYNCNORM_KERNELS=reference chooses the plain one everywhere.
const KernelSet& kernels_for(c10::Device device);

/// For tests: `set` is used for every device while this lives.
class ScopedKernels {
 public:
  explicit ScopedKernels(const KernelSet& set);
  ~ScopedKernels();
  ScopedKernels(const ScopedKernels&) = delete;
  ScopedKernels& operator=(const ScopedKernels&) = delete;
};

}  // namespace syncnorm::kernels
