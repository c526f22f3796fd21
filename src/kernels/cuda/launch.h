#pragma once

#include <cstdint>

/// The CUDA kernels as plain functions: raw device pointers, sizes and a stream, no torch header.
/// The same sources run on the host in tests, over an emulation of the device.
///
/// All work is queued on `stream` and nothing waits for the host, so every call can be captured in
/// a graph. Results have the same bits from run to run. Sums across threads are double; lanes sum
/// in the dtype of computation (float for half types) about a value of their own input, and move to
/// `center` in double. No call needs aligned data or a size that divides by anything; any size may
/// be zero.
namespace syncnorm::kernels::cuda {

using Stream = void*;  ///< cudaStream_t
using Status = int;    ///< cudaError_t

enum class Dtype : uint8_t { float32, float64, float16, bfloat16 };

/// An array of its own dtype: parameters and running statistics. Null where absent.
struct Values {
  const void* data = nullptr;
  Dtype dtype = Dtype::float32;
};
struct MutableValues {
  void* data = nullptr;
  Dtype dtype = Dtype::float32;
};

/// NormLayout and CellLayout as the device sees them: element (o, c, i) lies at
/// (o*cells + c)*inner + i.
struct Layout {
  int64_t outer = 0, cells = 0, inner = 0;
  int64_t slots = 0;
  const int64_t* slot_of_cell = nullptr;  ///< [cells]; null: each cell is a slot of its own
  /// Its inverse, which passes that add need with it: the cells of slot s are
  /// cells_by_slot[slot_begin[s] .. slot_begin[s + 1]], which is the order they are added in.
  const int64_t* cells_by_slot = nullptr;
  const int64_t* slot_begin = nullptr;
  const double* share = nullptr;  ///< [cells]; null: all 1
  /// Cell c takes row c % affine_rows of weight and bias: [affine_rows] or, by column (then
  /// outer == 1), [affine_rows, inner].
  int64_t affine_rows = 1;
  bool by_column = false;
  bool centered = true;

  constexpr int64_t sums() const { return centered ? 2 : 1; }
};

/// Values a slot holds over all ranks, at least 1 where it divides.
struct Count {
  double all = 0;
  const double* total = nullptr;  ///< device: then it is *total / slots_of_total instead
  double slots_of_total = 1;
  const double* each = nullptr;  ///< device [slots]: or these
};

/// What a kernel writes in front of the sums that travel.
struct Header {
  static constexpr int kMaxWords = 6;
  double* to = nullptr;  ///< null: nothing to write
  int words = 0;
  double values[kMaxWords] = {};
  /// Of forward sums about a running mean: h and h*h, h < 2^16 a hash of the centers' bits, go here
  /// (null: not wanted). After the sum all ranks had the same centers exactly if
  /// ranks*sum(h*h) == sum(h)^2.
  double* center_hash = nullptr;
};

/// What the device found, left where the host can read it without waiting.
enum Verdict : int32_t {
  kPending = 0,
  kFine,
  kDisagreement,    ///< the ranks' tags differ
  kCentersDiffer,   ///< the ranks' running means differ
  kShardsDoNotFit,  ///< the ranks' values do not add up to `total_values`
  kSingleValue,     ///< one value a slot over all ranks
  kLostDigits,      ///< results stand, but their digits are fewer than the dtype has
};

/// What the kernel after an exchange checks first. Unless fine or kLostDigits, its outputs are NaN
/// and buffers stay as they are.
struct Check {
  int32_t* verdict = nullptr;    ///< host memory the device can write; null: no check
  const double* tags = nullptr;  ///< the summed words: ranks*tag, ranks*tag*tag
  double tag = 0;
  double ranks = 1;
  const double* center_hash = nullptr;  ///< the summed words, null: no such check
  double total_values = 0;              ///< zero: not known; else what Count::total must be
  bool refuses_single_value = false;    ///< where all slots count alike: Count::each is null
};

/// A device's size, for the number of blocks; and memory for their partial sums.
struct Resources {
  int multiprocessors = 1;
  int32_t* counters = nullptr;  ///< [kCounters], zero before and after every call
  void* workspace = nullptr;    ///< of the bytes that the call's *_workspace() says; 16-aligned
  Stream stream = nullptr;
};
constexpr int64_t kCounters = 4096;

/// sum(x - center), unless not centered, and sum((x - center)^2) of each slot, each value times the
/// cell's share.
struct Moments {
  Layout layout;
  Dtype dtype = Dtype::float32;
  const void* x = nullptr;
  const void* residual = nullptr;  ///< null, or x + residual is meant, which is written to `sum`
  void* sum = nullptr;
  Values center_from;        ///< [slots], what is not finite counts as zero; null: zeros
  double* center = nullptr;  ///< out, unless center_from is null: [slots]
  double* sums = nullptr;    ///< out: [layout.sums(), slots]
  Header header;
};
int64_t moments_workspace(const Moments& call, int multiprocessors);
Status launch(const Moments& call, const Resources& resources);

/// Statistics from the ranks' sums, and running statistics with them.
struct Finish {
  const double* sums = nullptr;  ///< [layout.sums(), slots]; null: `statistics` are there already
  const double* center = nullptr;
  Count count;
  double eps = 0;
  double floor = 0;  ///< see kernels::Precision
  double ratio = 0;
  MutableValues running_mean;  ///< null: none; unchanged where the count is below 2
  MutableValues running_var;   ///< takes the unbiased variance
  double momentum = 0;         ///< negative: 1/(batches + 1)
  int64_t* batches = nullptr;  ///< one more, where running statistics change; null: none
  Check check;
};

/// y = activation((x - mean)*rstd*weight + bias + residual).
struct Apply {
  Layout layout;
  Dtype dtype = Dtype::float32;
  const void* x = nullptr;
  const void* residual = nullptr;  ///< not by column
  void* y = nullptr;
  Values weight, bias;
  bool relu = false;             ///< not by column; NaN stays
  double* statistics = nullptr;  ///< [3, slots]: mean, biased variance, rstd; written by `finish`
  Finish finish;
};
/// The finishing alone, y null, too: a rank whose input is empty takes part all the same.
Status launch(const Apply& call, const Resources& resources);

/// Which elements' gradients a ReLU lets through, see loops::Gate.
enum class Gate : uint8_t { open, recompute, output };

/// What both passes of the backward read.
struct Backward {
  Layout layout;
  Dtype dtype = Dtype::float32;
  const void* x = nullptr;
  const void* dy = nullptr;
  const void* output = nullptr;  ///< of Gate::output
  Gate gate = Gate::open;
  Values weight, bias;
  const double* statistics = nullptr;  ///< [3, slots]
};

/// With g the gradient that passes the gate: sum(g*weight), unless not centered, and
/// sum(g*weight*xhat) of each slot; sum(g) and sum(g*xhat) of each element of bias and weight.
struct BackwardSums {
  Backward of;
  double* of_slots = nullptr;   ///< [layout.sums(), slots]
  double* of_affine = nullptr;  ///< [2, affine_rows] or [2, affine_rows, inner]; null: not wanted
  /// Or in the parameters' own dtype, where no other rank adds to them. Null: not wanted.
  MutableValues dbias, dweight;
  Header header;
};
int64_t backward_sums_workspace(const BackwardSums& call, int multiprocessors);
Status launch(const BackwardSums& call, const Resources& resources);

/// dx = rstd*(g*weight - mean(g*weight) - xhat*mean(g*weight*xhat)) + extra, each mean times the
/// cell's share; dresidual = g.
struct BackwardApply {
  Backward of;
  const double* sums = nullptr;  ///< of the ranks: [layout.sums(), slots]
  Count count;
  const void* extra = nullptr;  ///< by column only
  void* dx = nullptr;           ///< null: not wanted
  void* dresidual = nullptr;    ///< likewise; not by column
  Check check;
};
Status launch(const BackwardApply& call, const Resources& resources);

}  // namespace syncnorm::kernels::cuda
