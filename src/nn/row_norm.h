#pragma once

#include <torch/types.h>

#include <memory>
#include <string>

#include "nn/prepared_norm.h"

namespace syncnorm {

/// Arguments shared by the norms over split rows and their functional forms.
struct RowNormArguments {
  int64_t hidden = 0;  ///< length of a whole row
  torch::Tensor weight;
  torch::Tensor bias;
  double eps = 0;
  bool centered = true;
  bool unit_offset = false;
  std::shared_ptr<Communicator> comm;
  std::string name;
};

/// Normalises the rows of `input` [..., h], or of `input + residual`, with the statistics of the
/// whole rows; one collective. Gives the output, and the sum where there is one.
PreparedNorm prepare_row_norm(const torch::Tensor& input, const torch::Tensor& residual,
                              const RowNormArguments& arguments);

}  // namespace syncnorm
