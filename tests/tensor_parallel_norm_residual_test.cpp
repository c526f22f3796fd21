// norm(x, residual) of split rows: the sum bit for bit as torch adds it, the norm of that sum, and
// the gradients that meet in it, against torch in double on whole rows.
#include <gtest/gtest.h>

#include "support/batch.h"
#include "support/columns.h"
#include "support/tolerance.h"
#include "syncnorm/tensor_parallel_norm.h"

namespace syncnorm {
namespace {

using testing::columns_of;
using testing::message_of;
using testing::new_world;
using testing::relative_difference;

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
};

/// Sums of a few dozen terms in another order in double.
double tolerance(torch::ScalarType dtype) { return testing::norm_tolerance(dtype, 1e-12); }

/// The two kinds behind one face, affine parameters drawn for whole rows.
struct Norm {
  Norm(const Trial& trial, const std::vector<int64_t>& shards,
       const std::shared_ptr<Communicator>& comm) {
    const auto hidden = trial.shape.back();
    weight = torch::randn({hidden}).to(trial.dtype);
    bias = torch::randn({hidden}).to(trial.dtype);
    const auto fill = [&](auto& norm) {
      norm->to(trial.dtype);
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

torch::Tensor loss_of(const torch::Tensor& y, const torch::Tensor& sum, const torch::Tensor& dy,
                      const torch::Tensor& dsum, Uses uses) {
  if (uses == Uses::norm) return (y * dy).sum();
  if (uses == Uses::sum) return (sum * dsum).sum();
  return (y * dy).sum() + (sum * dsum).sum();
}

torch::Tensor with_gaps(const torch::Tensor& values, bool gaps) {
  return gaps ? torch::stack({values, values}, -1).select(-1, 1) : values;
}

void run(const Trial& trial, const std::shared_ptr<Communicator>& comm, uint64_t seed) {
  std::mt19937 generator(seed);
  torch::manual_seed(seed);
  const auto shards = testing::random_shards(trial.shape.back(), comm->size(), generator);
  const auto mine = [&](const torch::Tensor& whole) {
    return columns_of(whole, shards, comm->rank());
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

TEST(TensorParallelNormResidual, EqualsSumAndNormOfWholeRows) {
  const auto comm = new_world();
  uint64_t seed = 0;
  for (const bool layer : {true, false})
    for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf})
      for (const auto uses : {Uses::both, Uses::norm, Uses::sum})
        for (const int needs : {1, 2, 3, 4}) {
          Trial trial;
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

TEST(TensorParallelNormResidual, FrozenStreamCostsNoBackwardCollective) {
  if (!testing::host_waits()) GTEST_SKIP() << "backward communicates in any case";
  const auto comm = new_world();
  for (const bool layer : {true, false}) {
    Trial trial;
    trial.layer = layer;
    trial.uses = Uses::norm;
    trial.x_needs = trial.residual_needs = false;
    run(trial, comm, 300);
  }
}

/// Rounding, halves of two to the power of minus 24 and infinity among them.
TEST(TensorParallelNormResidual, TheSumIsTorchsBitForBit) {
  const auto comm = new_world();
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    torch::manual_seed(9);
    const auto shards = balanced_shards(37, comm->size());
    const auto scale = torch::pow(2.0, torch::randint(-30, 18, {200, 37}).to(torch::kDouble));
    const auto x = columns_of((torch::randn({200, 37}) * scale).to(dtype), shards, comm->rank());
    const auto residual =
        columns_of((torch::randn({200, 37}) * scale).to(dtype), shards, comm->rank());
    Trial trial;
    trial.shape = {200, 37};
    trial.dtype = dtype;
    for (const bool layer : {true, false}) {
      trial.layer = layer;
      const auto [y, sum] = Norm(trial, shards, comm)(x, residual);
      const auto expected = x + residual;
      const auto bits = [](const torch::Tensor& of) {  // NaN has many
        return torch::where(of.isnan(), torch::ones_like(of), of).view(torch::kUInt8);
      };
      EXPECT_TRUE(torch::equal(sum.isnan(), expected.isnan())) << dtype;
      EXPECT_TRUE(torch::equal(bits(sum), bits(expected))) << dtype;
    }
  }
}

TEST(TensorParallelNormResidual, CostsNothingMoreOnTheWire) {
  const auto comm = new_world();
  Trial trial;
  const auto shards = balanced_shards(29, comm->size());
  for (const bool layer : {true, false}) {
    trial.layer = layer;
    Norm norm(trial, shards, comm);
    const auto x = torch::randn({4, shards[comm->rank()]}).requires_grad_();
    comm->reset_counters();
    norm(x).sum().backward();
    const auto plain = comm->counters();
    comm->reset_counters();
    const auto [y, sum] = norm(x, torch::randn_like(x));
    (y.sum() + sum.sum()).backward();
    EXPECT_EQ(comm->counters().collectives(), plain.collectives());
    EXPECT_EQ(comm->counters().bytes, plain.bytes);
  }
}

TEST(TensorParallelNormResidual, DoubleBackward) {
  const auto comm = new_world();
  for (const bool layer : {true, false}) {
    Trial trial;
    trial.layer = layer;
    trial.dtype = torch::kDouble;
    torch::manual_seed(77);
    const auto shards = balanced_shards(29, comm->size());
    Norm norm(trial, shards, comm);
    const auto whole_x = torch::randn(trial.shape, torch::kDouble).requires_grad_();
    const auto whole_residual = torch::randn(trial.shape, torch::kDouble).requires_grad_();
    const auto second = [](const torch::Tensor& y, const torch::Tensor& sum, const torch::Tensor& x,
                           const torch::Tensor& residual) {
      const auto loss = y.pow(3).sum() + sum.square().sum();
      const auto first = torch::autograd::grad({loss}, {x, residual}, {}, true, true);
      return torch::autograd::grad({(first[0] * first[1]).sum()}, {x, residual});
    };
    const auto sum = whole_x + whole_residual;
    const auto expected = second(norm.whole(sum, norm.weight), sum, whole_x, whole_residual);
    auto x = columns_of(whole_x.detach(), shards, comm->rank()).requires_grad_();
    auto residual = columns_of(whole_residual.detach(), shards, comm->rank()).requires_grad_();
    const auto [y, own_sum] = norm(x, residual);
    const auto got = second(y, own_sum, x, residual);
    for (const size_t i : {0, 1})
      EXPECT_LT(relative_difference(got[i], columns_of(expected[i], shards, comm->rank())), 1e-10);
  }
}

TEST(TensorParallelNormResidual, ChangingTheSumBeforeBackwardIsRefused) {
  const auto comm = new_world();
  TensorParallelRMSNorm norm(TensorParallelRMSNormOptions(8).communicator(comm));
  const auto x = torch::randn({2, norm->weight.size(0)}).requires_grad_();
  const auto [y, sum] = norm(x, torch::randn_like(x));
  sum.add_(1);
  EXPECT_NE(message_of<c10::Error>([&, y = y] { y.sum().backward(); }).find("inplace"),
            std::string::npos);
}

TEST(TensorParallelNormResidual, WrongResidualsAreRefusedBeforeCommunication) {
  const auto comm = new_world();
  TensorParallelLayerNorm norm(
      TensorParallelLayerNormOptions(8).communicator(comm).name("block.norm"));
  const auto h = norm->weight.size(0);
  const auto x = torch::randn({2, h});
  for (const auto& residual : {torch::Tensor(), torch::randn({h}), torch::randn({2, 1, h}),
                               torch::randn({2, h}, torch::kDouble)}) {
    const auto message = message_of<c10::Error>([&] { norm(x, residual); });
    EXPECT_NE(message.find("block.norm: "), std::string::npos) << message;
    EXPECT_NE(message.find("residual"), std::string::npos) << message;
  }
  EXPECT_EQ(comm->counters().collectives(), 0);
}

}  // namespace
}  // namespace syncnorm
