#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace syncnorm::kernels {

/// How a dense tensor's memory is cut into slots: element (o, s, i) of [outer, slots, inner] lies
/// at (o*slots + s)*inner + i. NCHW batch norm is [N, C, H*W], channels-last [N*H*W, C, 1], rows of
/// a hidden dimension [1, rows, hidden].
struct SlotLayout {
  int64_t outer = 0;
  int64_t slots = 0;
  int64_t inner = 0;

  int64_t numel() const { return outer * slots * inner; }
};

/// The passes over memory that norms consist of. Inputs are dense, float or double, laid out as
/// `layout` says; sums are double whatever the input. Implementations are stateless and give the
/// same bits from run to run.
class KernelSet {
 public:
  virtual ~KernelSet() = default;

  /// [2, slots] double: sum(x - center), sum((x - center)^2). `center`: double [slots].
  virtual at::Tensor moments(const at::Tensor& x, const SlotLayout& layout,
                             const at::Tensor& center) const = 0;

  /// [2, slots] double: sum(dy), sum(dy * (x - center)).
  virtual at::Tensor backward_sums(const at::Tensor& x, const at::Tensor& dy,
                                   const SlotLayout& layout, const at::Tensor& center) const = 0;

  /// y = (x - center)*scale + shift; `coefficients`: [3, slots] (center, scale, shift) in the dtype
  /// of x. Centering first keeps the digits of an x far from zero.
  virtual void apply(const at::Tensor& x, const SlotLayout& layout, const at::Tensor& coefficients,
                     const at::Tensor& y) const = 0;

  /// dx = a*dy + b*(x - center) + c; `coefficients`: [4, slots] (center, a, b, c) in the dtype of
  /// x.
  virtual void backward_apply(const at::Tensor& x, const at::Tensor& dy, const SlotLayout& layout,
                              const at::Tensor& coefficients, const at::Tensor& dx) const = 0;
};

/// Plain ATen operations, for any device: what the others are compared with.
const KernelSet& reference_kernels();

/// Vectorised loops for the CPU.
const KernelSet& cpu_kernels();

/// Null where the library was built without CUDA kernels.
const KernelSet* cuda_kernels();

/// The set for tensors on `device`. SYNCNORM_KERNELS=reference chooses the plain one everywhere.
const KernelSet& kernels_for(c10::Device device);

}  // namespace syncnorm::kernels
