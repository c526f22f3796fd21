#pragma once

#include "support/batch.h"
#include "support/columns.h"
#include "support/tolerance.h"
#include "syncnorm/tensor_parallel_norm.h"

/// norm(x, residual) of split rows on a device against torch in double on whole rows on the CPU.
namespace syncnorm::testing::residual_norm {

/// Which outputs a loss is made of.
enum class Uses { both, norm, sum };

struct Trial {
  std::vector<int64_t> shape{3, 5, 29};
  bool layer = true;
  torch::ScalarType dtype = torch::kFloat;
  Uses uses = Uses::both;
  bool x_needs = true, residual_needs = true;
  bool same = false;  ///< x is its own residual
  bool gaps = false;  ///< x and residual have strides of their own
  torch::Device device = torch::kCPU;
};

/// Sums of a few dozen terms in another order in double.
inline double tolerance(torch::ScalarType dtype) { return norm_tolerance(dtype, 1e-12); }

/// The two kinds behind one face, affine parameters drawn for whole rows.
struct Norm {
  Norm(const Trial& trial, const std::vector<int64_t>& shards,
       const std::shared_ptr<Communicator>& comm) {
    const auto hidden = trial.shape.back();
    weight = torch::randn({hidden}).to(trial.dtype);
    bias = torch::randn({hidden}).to(trial.dtype);
    const auto fill = [&](auto& norm) {
      norm->to(trial.device, trial.dtype);
      const torch::NoGradGuard no_grad;
      norm->weight.copy_(columns_of(weight, shards, comm->rank()));
      if (norm->bias.defined()) norm->bias.copy_(columns_of(bias, shards, comm->rank()));
    };
    if (trial.layer) {
      layer = TensorParallelLayerNorm(
          TensorParallelLayerNormOptions(hidden).shard_sizes(shards).communicator(comm).name("n"));
      fill(layer);
    } else {
      rms = TensorParallelRMSNorm(
          TensorParallelRMSNormOptions(hidden).shard_sizes(shards).communicator(comm).name("n"));
      fill(rms);
    }
  }
  NormAndResidual operator()(const torch::Tensor& x, const torch::Tensor& residual) {
    return rms.is_empty() ? layer(x, residual) : rms(x, residual);
  }
  torch::Tensor operator()(const torch::Tensor& x) { return rms.is_empty() ? layer(x) : rms(x); }
  torch::Tensor whole(const torch::Tensor& rows, const torch::Tensor& of_weight) const {
    const auto hidden = rows.sizes().slice(rows.dim() - 1);
    return rms.is_empty()
               ? torch::layer_norm(rows, hidden, of_weight, bias.to(torch::kDouble), 1e-5)
               : at::rms_norm(rows, hidden, of_weight, 1e-6);
  }
  torch::Tensor& own_weight() { return rms.is_empty() ? layer->weight : rms->weight; }

  TensorParallelLayerNorm layer{nullptr};
  TensorParallelRMSNorm rms{nullptr};
  torch::Tensor weight, bias;
};

inline torch::Tensor loss_of(const torch::Tensor& y, const torch::Tensor& sum,
                             const torch::Tensor& dy, const torch::Tensor& dsum, Uses uses) {
  if (uses == Uses::norm) return (y * dy).sum();
  if (uses == Uses::sum) return (sum * dsum).sum();
  return (y * dy).sum() + (sum * dsum).sum();
}

inline torch::Tensor with_gaps(const torch::Tensor& values, bool gaps) {
  return gaps ? torch::stack({values, values}, -1).select(-1, 1) : values;
}

inline void run(const Trial& trial, const std::shared_ptr<Communicator>& comm, uint64_t seed) {
  std::mt19937 generator(seed);
  torch::manual_seed(seed);
  const auto shards = random_shards(trial.shape.back(), comm->size(), generator);
  const auto mine = [&](const torch::Tensor& whole) {
    return columns_of(whole, shards, comm->rank()).to(trial.device);
  };
  Norm norm(trial, shards, comm);
  const auto draw = [&] { return torch::randn(trial.shape).to(trial.dtype); };
  const auto whole_x = draw(), whole_residual = trial.same ? whole_x : draw() * 3;
  const auto whole_dy = draw(), whole_dsum = draw();

  // What is normalised is the rounded sum.
  const auto whole_sum = whole_x + whole_residual;
  const auto stream = whole_sum.to(torch::kDouble).requires_grad_();
  const auto weight = norm.weight.to(torch::kDouble).requires_grad_();
  const auto expected = norm.whole(stream, weight);
  loss_of(expected, stream, whole_dy.to(torch::kDouble), whole_dsum.to(torch::kDouble), trial.uses)
      .backward();

  auto x = with_gaps(mine(whole_x), trial.gaps).detach().set_requires_grad(trial.x_needs);
  auto residual = trial.same ? x
                             : with_gaps(mine(whole_residual), trial.gaps)
                                   .detach()
                                   .set_requires_grad(trial.residual_needs);
  comm->reset_counters();
  const auto [y, sum] = norm(x, residual);
  EXPECT_EQ(comm->counters().collectives(), 1 + comm->counters().second_exchanges);
  EXPECT_TRUE(torch::equal(sum, mine(whole_sum)));
  const double near = tolerance(trial.dtype);
  EXPECT_LT(relative_difference(y, mine(expected)), near);
  const bool needs = trial.x_needs || trial.residual_needs;
  EXPECT_EQ(sum.requires_grad() && y.requires_grad(), needs || norm.own_weight().requires_grad());

  comm->reset_counters();
  // In double, so that the products of the loss are not rounded.
  const auto in_double = [](const torch::Tensor& values) { return values.to(torch::kDouble); };
  loss_of(in_double(y), in_double(sum), in_double(mine(whole_dy)), in_double(mine(whole_dsum)),
          trial.uses)
      .backward();
  EXPECT_EQ(comm->counters().collectives(), needs ? 1 : 0);
  const auto gradient = mine(stream.grad());
  if (trial.same) {
    EXPECT_LT(relative_difference(x.grad(), 2 * gradient), near);
  } else {
    for (const auto& [of, wanted] : {std::pair{x, trial.x_needs}, {residual, trial.residual_needs}})
      if (wanted) {
        EXPECT_LT(relative_difference(of.grad(), gradient), near);
      } else {
        EXPECT_FALSE(of.grad().defined());
      }
  }
  if (trial.uses == Uses::sum) return;
  // A shard of few columns may hold only small sums of larger terms.
  EXPECT_LT(relative_difference(norm.own_weight().grad(), mine(weight.grad())), 3 * near);
}

/// Both norms, every dtype, with gradients for some of the tensors through some of the outputs.
inline void run_all(const std::shared_ptr<Communicator>& comm, torch::Device device) {
  uint64_t seed = 0;
  for (const bool layer : {true, false})
    for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf})
      for (const auto uses : {Uses::both, Uses::norm, Uses::sum})
        for (const int needs : {1, 2, 3, 4}) {
          Trial trial;
          trial.device = device;
          trial.layer = layer;
          trial.dtype = dtype;
          trial.uses = uses;
          trial.same = needs == 4;
          trial.x_needs = (needs & 1) != 0 || trial.same;
          trial.residual_needs = (needs & 2) != 0 || trial.same;
          trial.gaps = seed % 3 == 2;
          if (seed % 2 == 1) trial.shape = {70, 3};  // rows of one column or none
          SCOPED_TRACE(::testing::Message() << (layer ? "layer " : "rms ") << dtype << " uses "
                                            << int(uses) << " needs " << needs);
          run(trial, comm, ++seed);
        }
}

}  // namespace syncnorm::testing::residual_norm
