#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>

#include "autograd/layout.h"
#include "syncnorm/communicator.h"

namespace syncnorm {

/// Statistics of every slot over all ranks.
struct Moments {
  at::Tensor mean;      ///< double [slots]; zero where the norm is not centered
  at::Tensor variance;  ///< double [slots], biased; the mean square where the norm is not centered
  at::Tensor count;     ///< values a slot: double [] or [slots]
  /// Ranks whose input needs a gradient: with none of them, nobody's backward has to communicate.
  int64_t ranks_wanting_gradient = 0;
};

/// What ranks must agree about, and how far the digits must reach.
struct MomentsRequest {
  std::shared_ptr<Communicator> comm;
  at::ScalarType dtype = at::kFloat;  ///< of the user's input
  double eps = 0;
  bool wants_gradient = false;
  bool grad_mode = false;
  /// The variance itself is kept, and not only used beside eps.
  bool keeps_variance = false;
  std::string details;  ///< "field=value;" of what else must agree
};

/// Local sums about `center`, one all-reduce, and the moments that follow from the sums.
///
/// `center`: double [slots], finite, equal on all ranks, undefined for zero; the closer to the mean
/// the better. Where it was so far from the mean that the subtraction sum(d^2) - sum(d)^2/n lost
/// more digits than `dtype` can bear, which all ranks see in the same sums, a second exchange about
/// the now known mean repairs it (counted in Counters::second_exchanges).
Moments exchange_moments(const NormInput& input, const NormLayout& layout, const at::Tensor& center,
                         const MomentsRequest& request);

/// Sums `local`, double, over all ranks in one tagged all-reduce. `pass` says what for ("backward",
/// ...).
at::Tensor exchange_sums(const at::Tensor& local, const std::shared_ptr<Communicator>& comm,
                         const char* pass);

}  // namespace syncnorm
