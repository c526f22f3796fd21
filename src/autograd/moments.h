#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/deferred.h"
#include "kernels/kernels.h"
#include "kernels/layout.h"
#include "syncnorm/communicator.h"

namespace syncnorm {

/// Statistics of every slot over all ranks.
struct Moments {
  at::Tensor statistics;  ///< double [3, slots], see kernels::StatisticsRow
  SlotCount count;
  /// Ranks whose input needs a gradient: with none of them, nobody's backward has to communicate.
  int64_t ranks_wanting_gradient = 0;
  /// On a device that the host does not wait for: what `statistics`, still empty, will be made of
  /// when they are applied. The count is on the device, and every rank may want a gradient.
  std::shared_ptr<kernels::Arriving> arriving;
};

/// One norm's part in an exchange: what to sum, what ranks must agree about, and how far the digits
/// must reach.
struct MomentsRequest {
  NormInput input;
  const NormLayout& layout;
  at::ScalarType dtype = at::kFloat;  ///< of the user's input
  double eps = 0;
  /// [slots], equal on all ranks, undefined for zeros; the closer to the mean the better, and zero
  /// is meant where it is not finite.
  at::Tensor running_mean;
  bool wants_gradient = false;
  bool grad_mode = false;
  /// The variance itself is kept, and not only used beside eps.
  bool keeps_variance = false;
  std::string details;  ///< "field=value;" of what else must agree
  /// The input is the sum of these two, yet to be written; or both undefined.
  at::Tensor term, residual;
  /// Tells requests that share an exchange apart, "norm 1 (bn2)"; empty where there is one.
  std::string label;
  at::Tensor center;  ///< set by exchange_moments: running_mean as the sums take it, double
};

/// Local sums about each request's center, one all-reduce for all requests, and the moments that
/// follow.
///
/// Where a center was so far from the mean that the subtraction sum(d^2) - sum(d)^2/n lost more
/// digits than the dtype can bear, which all ranks see in the same sums, a second exchange about
/// the now known mean repairs it (counted in Counters::second_exchanges).
std::vector<Moments> exchange_moments(std::vector<MomentsRequest>& requests,
                                      const std::shared_ptr<Communicator>& comm);

/// Sums `local`, double, over all ranks in one tagged all-reduce. `pass` says what for ("backward",
/// ...).
at::Tensor exchange_sums(const at::Tensor& local, const std::shared_ptr<Communicator>& comm,
                         const char* pass);

}  // namespace syncnorm
