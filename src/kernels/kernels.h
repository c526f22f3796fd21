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

/// Scale and shift that differ along a slot: slot s, position i take element (s % rows, i). Dense
/// [rows, inner] in the dtype of x; a bias comes with a weight only. Layouts with columns have
/// outer == 1.
struct Columns {
  at::Tensor weight;
  at::Tensor bias;
  int64_t rows = 0;  ///< 0: no columns

  bool any() const { return rows > 0; }
};

struct BackwardSums {
  at::Tensor slots;  ///< [2, slots] double: sum(g), sum(g * (x - center)), g = dy * columns.weight
  at::Tensor columns;  ///< [2, rows, inner] double: sum(dy * xhat), sum(dy); only with columns
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

  /// `affine` [3, slots] double (center, scale, shift) says what xhat = (x - center)*scale + shift
  /// is.
  virtual BackwardSums backward_sums(const at::Tensor& x, const at::Tensor& dy,
                                     const SlotLayout& layout, const at::Tensor& affine,
                                     const Columns& columns) const = 0;

  /// y = ((x - center)*scale + shift) * columns.weight + columns.bias; `coefficients`: [3, slots]
  /// (center, scale, shift) in the dtype of x. Centering first keeps the digits of an x far from
  /// zero.
  virtual void apply(const at::Tensor& x, const SlotLayout& layout, const at::Tensor& coefficients,
                     const Columns& columns, const at::Tensor& y) const = 0;

  /// dx = a*dy*columns.weight + b*((x - center)*scale) + c; `coefficients`: [5, slots] (center,
  /// scale, a, b, c) in the dtype of x. Scaling x first keeps b in range where x is not near one.
  virtual void backward_apply(const at::Tensor& x, const at::Tensor& dy, const SlotLayout& layout,
                              const at::Tensor& coefficients, const Columns& columns,
                              const at::Tensor& dx) const = 0;
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
