#pragma once

#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

#include "syncnorm/communicator.h"

namespace syncnorm {

/// What one call of a norm with a linear layer fixes for its forward and backward.
struct NormLinearCall : torch::CustomClassHolder {
  std::shared_ptr<Communicator> comm;
  std::string module;
  double eps = 0;
  bool centered = false;
  std::vector<int64_t> sizes;  ///< columns of the input by rank
  int64_t out_features = 0;    ///< of the whole weight
  bool keep_gathered = true;
  bool has_backward = false;  ///< this rank would wait for the others there

  int64_t hidden() const;
};

/// The normalised whole rows, and the statistics to go back.
struct GatheredRows {
  at::Tensor normalized;  ///< [hidden, rows] in the input's dtype
  at::Tensor statistics;  ///< double [3, rows], see kernels::StatisticsRow
  at::Tensor weight;      ///< of the norm, whole [hidden], only where centered and given
  at::Tensor bias;        ///< likewise
};

/// Normalises whole rows of which each rank has columns `x` [rows, h], in one all-gather that
/// carries the columns with each rank's own moments. `weight`, `bias` [h] are the norm's, undefined
/// where absent. `pass` says what for ("forward", ...).
GatheredRows gather_normalized(const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& bias, const NormLinearCall& call,
                               const char* pass);

/// This rank's part of a sum over ranks.
struct ScatteredGradient {
  at::Tensor of_columns;  ///< [rows, h], contiguous
  at::Tensor sums;        ///< double [2 or 1, rows]: sum(g), sum(g*xhat), g = gradient * weight
};

/// Sums the ranks' parts of the gradient of the normalised rows, `gradient` [hidden, rows], and
/// what of them the norm's backward has to know of whole rows, in one reduce-scatter.
ScatteredGradient scatter_gradient(const at::Tensor& gradient, const GatheredRows& rows,
                                   const NormLinearCall& call);

}  // namespace syncnorm
