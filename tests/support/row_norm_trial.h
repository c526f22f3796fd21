#pragma once

#include "support/batch.h"
#include "support/columns.h"
#include "support/tolerance.h"
#include "syncnorm/tensor_parallel_norm.h"

/// Norms of split rows on a device against torch's own in double on the whole rows on the CPU.
namespace syncnorm::testing::row_norm {

struct Trial {
  std::vector<int64_t> shape;  // of the whole rows
  std::vector<int64_t> shards;
  bool layer = true;
  torch::ScalarType dtype = torch::kDouble;
  torch::ScalarType parameter_dtype = torch::kDouble;
  bool affine = true, bias = true, unit_offset = false;
  double scale = 1, offset = 0;
  bool transposed = false;  // the input's strides are not the dense ones
  torch::Device device = torch::kCPU;
};

/// Double: sums of a few hundred terms.
inline double tolerance(torch::ScalarType dtype) { return norm_tolerance(dtype, 1e-12); }

struct Rows {
  torch::Tensor x, weight, bias;
};

inline torch::Tensor reference(const Rows& rows, const Trial& trial) {
  const auto hidden = rows.x.sizes().slice(rows.x.dim() - 1);
  const auto weight = rows.weight.defined() && trial.unit_offset ? rows.weight + 1 : rows.weight;
  if (trial.layer) return torch::layer_norm(rows.x, hidden, weight, rows.bias, 1e-5);
  const auto y =
      at::rms_norm(rows.x, hidden, weight.defined() ? std::optional(weight) : std::nullopt, 1e-6);
  return rows.bias.defined() ? y + rows.bias : y;
}

/// The module under test, either kind behind one face.
struct Norm {
  Norm(const Trial& trial, const std::shared_ptr<Communicator>& comm, const std::string& name) {
    const auto hidden = trial.shape.back();
    if (trial.layer) {
      layer = TensorParallelLayerNorm(TensorParallelLayerNormOptions(hidden)
                                          .elementwise_affine(trial.affine)
                                          .bias(trial.bias)
                                          .shard_sizes(trial.shards)
                                          .communicator(comm)
                                          .name(name));
      layer->to(trial.device, trial.parameter_dtype);
    } else {
      rms = TensorParallelRMSNorm(TensorParallelRMSNormOptions(hidden)
                                      .elementwise_affine(trial.affine)
                                      .bias(trial.bias)
                                      .unit_offset(trial.unit_offset)
                                      .shard_sizes(trial.shards)
                                      .communicator(comm)
                                      .name(name));
      rms->to(trial.device, trial.parameter_dtype);
    }
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return layer.is_empty() ? rms->forward(x) : layer->forward(x);
  }
  torch::Tensor& weight() { return layer.is_empty() ? rms->weight : layer->weight; }
  torch::Tensor& bias() { return layer.is_empty() ? rms->bias : layer->bias; }

  TensorParallelLayerNorm layer{nullptr};
  TensorParallelRMSNorm rms{nullptr};
};

inline void run(const Trial& trial, const std::shared_ptr<Communicator>& comm, uint64_t seed) {
  torch::manual_seed(seed);
  const auto hidden = trial.shape.back();
  const auto whole_x =
      (torch::randn(trial.shape, torch::kDouble) * trial.scale + trial.offset).to(trial.dtype);
  const auto whole_dy = torch::randn(trial.shape, torch::kDouble).to(trial.dtype);
  Rows rows{whole_x.to(torch::kDouble).clone().set_requires_grad(true), {}, {}};
  Norm norm(trial, comm, "norm");
  const auto draw = [&](torch::Tensor& parameter, torch::Tensor& whole) {
    if (!parameter.defined()) return;
    whole = torch::randn({hidden}, torch::kDouble).to(trial.parameter_dtype).to(torch::kDouble);
    const torch::NoGradGuard no_grad;
    parameter.copy_(columns_of(whole, trial.shards, comm->rank()));
    whole.set_requires_grad(true);
  };
  draw(norm.weight(), rows.weight);
  draw(norm.bias(), rows.bias);
  const auto expected = reference(rows, trial);
  expected.backward(whole_dy.to(torch::kDouble));

  auto x = columns_of(whole_x, trial.shards, comm->rank()).to(trial.device);
  auto dy = columns_of(whole_dy, trial.shards, comm->rank()).to(trial.device);
  if (trial.transposed) {
    x = x.transpose(0, -1).contiguous().transpose(0, -1);
    dy = torch::stack({dy, dy}, -1).select(-1, 1);
  }
  x.set_requires_grad(true);
  comm->reset_counters();
  const auto y = norm.forward(x);
  const auto& counters = comm->counters();
  EXPECT_EQ(counters.all_reduce, 1 + counters.second_exchanges);
  const int64_t row_count = hidden > 0 ? whole_x.numel() / hidden : 0;
  const int64_t bytes = 8 * (2 + 2 + row_count * (trial.layer ? 2 : 1));
  EXPECT_EQ(counters.bytes, bytes * (1 + counters.second_exchanges));
  comm->reset_counters();
  y.backward(dy);
  EXPECT_EQ(counters.collectives(), 1);
  EXPECT_EQ(counters.bytes, 8 * (2 + row_count * (trial.layer ? 2 : 1)));

  const double near = tolerance(trial.dtype);
  const auto mine = [&](const torch::Tensor& whole) {
    return columns_of(whole, trial.shards, comm->rank());
  };
  EXPECT_EQ(y.scalar_type(), trial.dtype);
  EXPECT_EQ(y.sizes(), x.sizes());
  EXPECT_LT(relative_difference(y.cpu(), mine(expected)), near);
  // dx falls with the scale of x.
  const double gradient_scale = std::max(1.0, 1 / std::max(trial.scale, 1e-300));
  EXPECT_LT(relative_difference(x.grad().to(torch::kCPU, torch::kDouble) / gradient_scale,
                                mine(rows.x.grad()) / gradient_scale),
            near);
  const double sums_near =
      std::max(tolerance(trial.parameter_dtype), 16 * 0x1p-24 * (near > 1e-10));
  if (trial.affine) {
    EXPECT_LT(relative_difference(norm.weight().grad().cpu(), mine(rows.weight.grad())), sums_near);
  }
  if (norm.bias().defined()) {
    EXPECT_LT(relative_difference(norm.bias().grad().cpu(), mine(rows.bias.grad())), sums_near);
  }
}

inline Trial random_trial(std::mt19937& generator, int ranks) {
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(generator);
  };
  Trial trial;
  const auto dims = draw(1, 4);
  for (int64_t d = 1; d < dims; ++d) trial.shape.push_back(draw(d == 1 ? 0 : 1, 6));
  // Rows of two are left to double: all of a layer norm's dx cancels there.
  trial.shape.push_back(std::vector<int64_t>{4, 5, 7, 16, 64, 130, 301}[draw(0, 6)]);
  trial.shards = random_shards(trial.shape.back(), ranks, generator);
  trial.layer = draw(0, 1) == 1;
  constexpr torch::ScalarType kTypes[] = {torch::kDouble, torch::kFloat, torch::kHalf,
                                          torch::kBFloat16};
  trial.dtype = kTypes[draw(0, 3)];
  const bool half = trial.dtype == torch::kHalf || trial.dtype == torch::kBFloat16;
  trial.parameter_dtype = half && draw(0, 1) == 1 ? torch::kFloat : trial.dtype;
  trial.affine = draw(0, 3) > 0;
  trial.bias = trial.affine && draw(0, 1) == 1;
  trial.unit_offset = !trial.layer && draw(0, 1) == 1;
  trial.transposed = draw(0, 2) == 0;
  if (!half) trial.offset = static_cast<double>(draw(0, 2));
  return trial;
}

inline Trial rows_of(std::vector<int64_t> shape, int ranks, bool layer, torch::ScalarType dtype) {
  Trial trial;
  trial.shape = std::move(shape);
  trial.shards = balanced_shards(trial.shape.back(), ranks);
  trial.layer = layer;
  trial.dtype = trial.parameter_dtype = dtype;
  return trial;
}

}  // namespace syncnorm::testing::row_norm
