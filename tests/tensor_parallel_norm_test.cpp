// Norms of split rows against torch's own on the whole rows in double, over random shapes, shards,
// dtypes and options.
#include "syncnorm/tensor_parallel_norm.h"

#include <gtest/gtest.h>

#include "support/batch.h"
#include "support/columns.h"
#include "support/tolerance.h"

namespace syncnorm {
namespace {

using testing::columns_of;
using testing::new_world;
using testing::relative_difference;

struct Trial {
  std::vector<int64_t> shape;  // of the whole rows
  std::vector<int64_t> shards;
  bool layer = true;
  torch::ScalarType dtype = torch::kDouble;
  torch::ScalarType parameter_dtype = torch::kDouble;
  bool affine = true, bias = true, unit_offset = false;
  double scale = 1, offset = 0;
  bool transposed = false;  // the input's strides are not the dense ones
};

/// Double: sums of a few hundred terms.
double tolerance(torch::ScalarType dtype) { return testing::norm_tolerance(dtype, 1e-12); }

struct Rows {
  torch::Tensor x, weight, bias;
};

torch::Tensor reference(const Rows& rows, const Trial& trial) {
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
      layer->to(trial.parameter_dtype);
    } else {
      rms = TensorParallelRMSNorm(TensorParallelRMSNormOptions(hidden)
                                      .elementwise_affine(trial.affine)
                                      .bias(trial.bias)
                                      .unit_offset(trial.unit_offset)
                                      .shard_sizes(trial.shards)
                                      .communicator(comm)
                                      .name(name));
      rms->to(trial.parameter_dtype);
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

void run(const Trial& trial, const std::shared_ptr<Communicator>& comm, uint64_t seed) {
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

  auto x = columns_of(whole_x, trial.shards, comm->rank());
  auto dy = columns_of(whole_dy, trial.shards, comm->rank());
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
  EXPECT_LT(relative_difference(y, mine(expected)), near);
  // dx falls with the scale of x.
  const double gradient_scale = std::max(1.0, 1 / std::max(trial.scale, 1e-300));
  EXPECT_LT(relative_difference(x.grad().to(torch::kDouble) / gradient_scale,
                                mine(rows.x.grad()) / gradient_scale),
            near);
  const double sums_near =
      std::max(tolerance(trial.parameter_dtype), 16 * 0x1p-24 * (near > 1e-10));
  if (trial.affine) {
    EXPECT_LT(relative_difference(norm.weight().grad(), mine(rows.weight.grad())), sums_near);
  }
  if (norm.bias().defined()) {
    EXPECT_LT(relative_difference(norm.bias().grad(), mine(rows.bias.grad())), sums_near);
  }
}

Trial random_trial(std::mt19937& generator, int ranks) {
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(generator);
  };
  Trial trial;
  const auto dims = draw(1, 4);
  for (int64_t d = 1; d < dims; ++d) trial.shape.push_back(draw(d == 1 ? 0 : 1, 6));
  // Rows of two are left to double: all of a layer norm's dx cancels there.
  trial.shape.push_back(std::vector<int64_t>{4, 5, 7, 16, 64, 130, 301}[draw(0, 6)]);
  trial.shards = testing::random_shards(trial.shape.back(), ranks, generator);
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

TEST(TensorParallelNorm, EqualsTheNormOfTheWholeRows) {
  const auto comm = new_world();
  std::mt19937 generator(31);
  for (int i = 0; i < 80; ++i) {
    SCOPED_TRACE("trial " + std::to_string(i));
    run(random_trial(generator, comm->size()), comm, i);
  }
}

Trial rows_of(std::vector<int64_t> shape, int ranks, bool layer, torch::ScalarType dtype) {
  Trial trial;
  trial.shape = std::move(shape);
  trial.shards = balanced_shards(trial.shape.back(), ranks);
  trial.layer = layer;
  trial.dtype = trial.parameter_dtype = dtype;
  return trial;
}

TEST(TensorParallelNorm, ManyRowsNoRowsFewColumns) {
  const auto comm = new_world();
  for (const bool layer : {true, false}) {
    run(rows_of({70000, 5}, comm->size(), layer, torch::kFloat), comm, 1);
    run(rows_of({0, 12}, comm->size(), layer, torch::kFloat), comm, 2);
    run(rows_of({3, 0, 12}, comm->size(), layer, torch::kBFloat16), comm, 3);
    run(rows_of({7, 2}, comm->size(), layer, torch::kDouble), comm, 4);
    run(rows_of({4, 4097}, comm->size(), layer, torch::kFloat), comm, 5);
  }
}

TEST(TensorParallelNorm, RowsFarFromOneNeitherOverflowNorUnderflow) {
  const auto comm = new_world();
  for (const bool layer : {true, false})
    for (const double scale : {1e18, 1e30, 1e-12}) {
      auto trial = rows_of({5, 40}, comm->size(), layer, torch::kFloat);
      trial.scale = scale;
      trial.affine = trial.bias = false;
      SCOPED_TRACE(scale);
      run(trial, comm, 9);
    }
}

TEST(TensorParallelNorm, FloatRowsKeepTheirDigitsFarFromZero) {
  if (!testing::host_waits()) GTEST_SKIP() << "no second exchange";
  const auto comm = new_world();
  for (const double offset : {2e3, 1e6}) {
    auto trial = rows_of({6, 60}, comm->size(), true, torch::kFloat);
    trial.offset = offset;
    run(trial, comm, 12);
  }
}

TEST(TensorParallelNorm, KeepsDigitsWhereTheRanksOwnMeansAreFarApart) {
  if (!testing::host_waits()) GTEST_SKIP() << "no second exchange";
  const auto comm = new_world();
  const auto shards = balanced_shards(48, comm->size());
  for (const double apart : {10.0, 1000.0}) {
    torch::manual_seed(4);
    auto whole = torch::randn({5, 48}) + 1e6;
    // Rank 0's columns lie above the others': no offset common to all ranks takes both off.
    whole.slice(1, 0, shards[0]) += apart;
    const auto expected = torch::layer_norm(whole.to(torch::kDouble), {48}, {}, {}, 1e-5);
    TensorParallelLayerNorm norm(
        TensorParallelLayerNormOptions(48).elementwise_affine(false).communicator(comm));
    comm->reset_counters();
    const auto y = norm(columns_of(whole, shards, comm->rank()));
    EXPECT_LT(relative_difference(y, columns_of(expected, shards, comm->rank())), 8 * 0x1p-24);
    // About zero, the variance has lost too much unless the ranks' distance makes it large.
    EXPECT_EQ(comm->counters().second_exchanges, apart < 100 || comm->size() == 1 ? 1 : 0);
  }
}

TEST(TensorParallelNorm, SecondDerivativesEqualThoseOfTheWholeRows) {
  const auto comm = new_world();
  const auto shards = balanced_shards(7, comm->size());
  for (const bool layer : {true, false}) {
    torch::manual_seed(3);
    Trial trial = rows_of({4, 7}, comm->size(), layer, torch::kDouble);
    Rows rows{torch::randn({4, 7}, torch::kDouble).set_requires_grad(true),
              torch::randn({7}, torch::kDouble).set_requires_grad(true),
              torch::randn({7}, torch::kDouble).set_requires_grad(true)};
    const auto dy = torch::randn({4, 7}, torch::kDouble);
    const auto penalty = [](const torch::autograd::variable_list& gradients) {
      return (gradients[0] * gradients[0]).sum() + (gradients[1] * gradients[1]).sum();
    };
    const auto whole =
        torch::autograd::grad({reference(rows, trial)}, {rows.x, rows.weight}, {dy}, true, true);
    penalty(whole).backward();

    Norm norm(trial, comm, "twice");
    norm.weight().set_data(columns_of(rows.weight.detach(), shards, comm->rank()));
    norm.bias().set_data(columns_of(rows.bias.detach(), shards, comm->rank()));
    auto x = columns_of(rows.x.detach(), shards, comm->rank()).set_requires_grad(true);
    const auto mine = torch::autograd::grad({norm.forward(x)}, {x, norm.weight()},
                                            {columns_of(dy, shards, comm->rank())}, true, true);
    penalty(mine).backward();
    EXPECT_LT(relative_difference(x.grad(), columns_of(rows.x.grad(), shards, comm->rank())),
              1e-11);
    EXPECT_LT(relative_difference(norm.weight().grad(),
                                  columns_of(rows.weight.grad(), shards, comm->rank())),
              1e-11);
  }
}

TEST(TensorParallelNorm, GradientOnSomeRanksOnly) {
  const auto comm = new_world();
  const auto shards = balanced_shards(11, comm->size());
  torch::manual_seed(2);
  const auto whole = torch::randn({3, 11}, torch::kDouble);
  auto reference_x = whole.clone().set_requires_grad(true);
  torch::layer_norm(reference_x, {11}, {}, {}, 1e-5).square().sum().backward();
  TensorParallelLayerNorm norm(TensorParallelLayerNormOptions(11).communicator(comm));
  norm->to(torch::kDouble);
  const bool wants = comm->rank() == comm->size() - 1;
  auto x = columns_of(whole, shards, comm->rank()).set_requires_grad(wants);
  norm(x).square().sum().backward();
  if (wants) {
    EXPECT_LT(relative_difference(x.grad(), columns_of(reference_x.grad(), shards, comm->rank())),
              1e-12);
  }
  EXPECT_TRUE(norm->weight.grad().defined());
}

}  // namespace
}  // namespace syncnorm
