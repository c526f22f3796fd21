// Norms of split rows against torch's own on the whole rows in double, over random shapes, shards,
// dtypes and options.
#include "syncnorm/tensor_parallel_norm.h"

#include <gtest/gtest.h>

#include "support/row_norm_trial.h"

namespace syncnorm {
namespace {

using testing::columns_of;
using testing::new_world;
using testing::relative_difference;
using testing::row_norm::Norm;
using testing::row_norm::random_trial;
using testing::row_norm::reference;
using testing::row_norm::Rows;
using testing::row_norm::rows_of;
using testing::row_norm::run;
using testing::row_norm::Trial;

TEST(TensorParallelNorm, EqualsTheNormOfTheWholeRows) {
  const auto comm = new_world();
  std::mt19937 generator(31);
  for (int i = 0; i < 80; ++i) {
    SCOPED_TRACE("trial " + std::to_string(i));
    run(random_trial(generator, comm->size()), comm, i);
  }
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
