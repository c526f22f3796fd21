#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "kernels/deferred.h"

namespace syncnorm::bench {

/// What is timed: one norm of one size.
struct Case {
  std::string norm;    ///< "batch_norm", "layer_norm" or "rms_norm"
  std::string layout;  ///< "contiguous", "channels_last" or "rows"
  at::ScalarType dtype;
  std::vector<int64_t> shape;

  int64_t numel() const { return c10::multiply_integers(shape); }
  int64_t bytes() const { return numel() * static_cast<int64_t>(c10::elementSize(dtype)); }
};

/// Every norm, layout and dtype at about these sizes of the input, in units of 10^6 bytes.
std::vector<Case> cases_of(const std::vector<int64_t>& megabytes);

/// The steps of a norm between which its exchanges stand, on tensors of its own.
class Problem {
 public:
  Problem(const Case& c, c10::Device device);
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  /// Each queues one kernel on the current stream.
  void copy() const;  ///< of the input, device to device
  void moments() const;
  void apply() const;
  void backward_sums() const;
  void backward_apply() const;

  /// Raises c10::Error where a step's result is not the plain kernels'.
  void check() const;

 private:
  kernels::Norm norm() const;

  at::Tensor x_, dy_, y_, dx_;
  NormLayout layout_;
  NormInput input_;
  at::Tensor weight_, bias_, dweight_, dbias_;
  at::Tensor running_mean_, running_var_, batches_;
  at::Tensor forward_words_, backward_words_;  ///< four in front of the sums, as on the wire
  at::Tensor forward_sums_, backward_sums_, statistics_;
};

/// A step and how often it passes over a tensor of the input's size.
struct Step {
  const char* name;
  void (Problem::*run)() const;
  int passes;
};
constexpr Step kSteps[] = {{"copy", &Problem::copy, 2},
                           {"moments", &Problem::moments, 1},
                           {"apply", &Problem::apply, 2},
                           {"backward_sums", &Problem::backward_sums, 2},
                           {"backward_apply", &Problem::backward_apply, 3}};

}  // namespace syncnorm::bench
