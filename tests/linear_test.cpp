// Linear layers split over ranks against torch::nn::Linear's values on one process, in double.
#include "syncnorm/linear.h"

#include <gtest/gtest.h>

#include <sstream>

#include "support/batch.h"
#include "support/world.h"
#include "syncnorm/collectives.h"
#include "syncnorm/convert.h"

namespace syncnorm {
namespace {

namespace nn = torch::nn;
using testing::message_of;
using testing::new_world;
using testing::relative_difference;
using torch::Tensor;

// Products of a few dozen terms of order one, in another order: some units of 2^-53 each.
constexpr double kTolerance = 1e-13;

using Comm = std::shared_ptr<Communicator>;
using Sizes = std::vector<int64_t>;

/// torch::nn::Linear as made after manual_seed(seed), in double.
nn::Linear plain_linear(int64_t in, int64_t out, uint64_t seed, bool bias = true) {
  torch::manual_seed(seed);
  nn::Linear linear(nn::LinearOptions(in, out).bias(bias));
  linear->to(torch::kDouble);
  return linear;
}

/// This rank's part of the last dimension.
Tensor own_columns(const Tensor& x, const Sharding& sharding) {
  return sharding.shard_of(x.movedim(-1, 0)).movedim(0, -1);
}

Tensor ranks_columns(const Tensor& x, const Sharding& sharding, int rank) {
  std::vector<Tensor> parts = {x.narrow(-1, 0, 0)};
  for (const auto& range : sharding.ranges[rank])
    parts.push_back(x.narrow(-1, range.offset, range.size));
  return torch::cat(parts, -1);
}

void expect_counts(const Comm& comm, const Sizes& counts, int64_t bytes) {
  const auto& c = comm->counters();
  EXPECT_EQ((Sizes{c.all_reduce, c.all_gather, c.reduce_scatter}), counts);
  EXPECT_EQ(c.bytes, bytes);
  comm->reset_counters();
}

/// Rows of the whole by rank: balanced, by uneven shards, gate and up, and with shared heads.
std::vector<RangesByRank> row_choices(int64_t out, int ranks, std::mt19937& generator) {
  RangesByRank uneven;
  int64_t offset = 0;
  for (const int64_t size : testing::random_shards(out, ranks, generator)) {
    uneven.push_back({{offset, size}});
    offset += size;
  }
  return {{}, uneven, gate_up_rows(out / 2, ranks), qkv_rows(4, 2, out / 8, ranks)};
}

struct Trial {
  RangesByRank rows;
  Sizes leading;
  Sizes in_sizes;  // empty: replicated input
  bool bias = true;
};

void run_column(const Trial& trial, const Comm& comm) {
  constexpr int64_t kIn = 6;
  constexpr int64_t kOut = 24;
  auto reference = plain_linear(kIn, kOut, 3, trial.bias);
  const bool sharded = !trial.in_sizes.empty();
  ColumnParallelLinear layer(ColumnParallelLinearOptions(kIn, kOut)
                                 .bias(trial.bias)
                                 .rows(trial.rows)
                                 .input_is_sharded(sharded)
                                 .in_shard_sizes(trial.in_sizes)
                                 .seed(3)
                                 .communicator(comm));
  layer->to(torch::kDouble);
  const auto rows = layer->sharding_of("weight");
  auto shape = trial.leading;
  shape.push_back(kIn);
  auto whole = torch::randn(shape, torch::kDouble).set_requires_grad(true);
  const auto factors = torch::randn({comm->size(), kOut}, torch::kDouble);
  // Every rank has work of its own, on shared rows too.
  const auto y = reference->forward(whole);
  Tensor loss = torch::zeros({}, torch::kDouble);
  for (int r = 0; r < comm->size(); ++r)
    loss = loss + ranks_columns(y * factors[r], rows, r).pow(2).sum();
  loss.backward();

  const auto inputs = sharded ? Sharding::consecutive(comm, 0, trial.in_sizes) : Sharding();
  auto x = whole.detach().clone();
  if (sharded) x = own_columns(x, inputs).detach().clone();
  x.set_requires_grad(true);
  comm->reset_counters();
  const auto y_own = layer->forward(x);
  const int64_t x_bytes = 8 * x.numel();
  expect_counts(comm, {0, sharded ? 1 : 0, 0}, sharded ? x_bytes : 0);
  EXPECT_LE(relative_difference(y_own, own_columns(y, rows)), kTolerance);
  (y_own * own_columns(factors[comm->rank()], rows)).pow(2).sum().backward();
  int64_t shared = 0;
  for (const auto& range : rows.shared_ranges()) shared += range.size;
  const int64_t extra = shared > 0 ? (trial.bias ? 2 : 1) : 0;
  expect_counts(comm, {extra + (sharded ? 0 : 1), 0, sharded ? 1 : 0},
                8 * (whole.numel() + shared * (kIn + (trial.bias ? 1 : 0))));
  const auto expected = sharded ? own_columns(whole.grad(), inputs) : whole.grad();
  EXPECT_LE(relative_difference(x.grad(), expected), kTolerance);
  EXPECT_LE(relative_difference(layer->weight.grad(), rows.shard_of(reference->weight.grad())),
            kTolerance);
  if (trial.bias) {
    EXPECT_LE(relative_difference(layer->bias.grad(), rows.shard_of(reference->bias.grad())),
              kTolerance);
  }
}

TEST(ColumnParallelLinear, EqualsLinearInValueAndGradients) {
  const auto comm = new_world();
  std::mt19937 generator(4);
  torch::manual_seed(4);
  for (int choice = 0; choice < 4; ++choice) {
    for (const auto& leading : std::vector<Sizes>{{}, {5}, {0}, {2, 3}}) {
      for (const bool sharded : {false, true}) {
        SCOPED_TRACE(c10::str("rows ", choice, " leading ", leading, " sharded ", sharded));
        Trial trial;
        trial.rows = row_choices(24, comm->size(), generator)[choice];
        trial.leading = leading;
        trial.bias = leading.size() != 1;
        if (sharded) trial.in_sizes = testing::random_shards(6, comm->size(), generator);
        run_column(trial, comm);
      }
    }
  }
}

TEST(ColumnParallelLinear, GathersItsOutput) {
  const auto comm = new_world();
  for (const bool bias : {false, true}) {
    auto reference = plain_linear(5, 7, 1, bias);
    ColumnParallelLinear layer(
        ColumnParallelLinearOptions(5, 7).bias(bias).gather_output(true).seed(1).communicator(
            comm));
    layer->to(torch::kDouble);
    auto whole = torch::randn({2, 3, 5}, torch::kDouble).set_requires_grad(true);
    auto x = whole.detach().clone().set_requires_grad(true);
    const auto y = layer->forward(x);
    const auto expected = reference->forward(whole);
    comm->reset_counters();
    EXPECT_LE(relative_difference(y, expected), kTolerance);
    y.pow(3).sum().backward();
    expect_counts(comm, {1, 0, 0}, 8 * x.numel());
    expected.pow(3).sum().backward();
    EXPECT_LE(relative_difference(x.grad(), whole.grad()), kTolerance);
    const auto rows = layer->sharding_of("weight");
    EXPECT_LE(relative_difference(layer->weight.grad(), rows.shard_of(reference->weight.grad())),
              kTolerance);
  }
}

void run_row(const Sizes& leading, const Sizes& in_sizes, const Sizes& out_sizes, bool bias,
             const Comm& comm) {
  constexpr int64_t kIn = 8;
  constexpr int64_t kOut = 6;
  const bool scatter = !out_sizes.empty();
  auto reference = plain_linear(kIn, kOut, 5, bias);
  const auto inputs = Sharding::consecutive(comm, 0, in_sizes);
  RowParallelLinear layer(RowParallelLinearOptions(kIn, kOut)
                              .bias(bias)
                              .columns(inputs.ranges)
                              .scatter_output(scatter)
                              .out_shard_sizes(out_sizes)
                              .seed(5)
                              .communicator(comm));
  layer->to(torch::kDouble);
  auto shape = leading;
  shape.push_back(kIn);
  auto whole = torch::randn(shape, torch::kDouble).set_requires_grad(true);
  const auto factors = torch::randn({kOut}, torch::kDouble);
  const auto expected = reference->forward(whole);
  (expected * factors).pow(2).sum().backward();

  const auto outputs = scatter ? Sharding::consecutive(comm, 0, out_sizes) : Sharding();
  const auto own = [&](const Tensor& t) { return scatter ? own_columns(t, outputs) : t; };
  auto x = own_columns(whole.detach(), inputs).set_requires_grad(true);
  comm->reset_counters();
  const auto y = layer->forward(x);
  expect_counts(comm, {scatter ? 0 : 1, 0, scatter ? 1 : 0}, 8 * expected.numel());
  EXPECT_LE(relative_difference(y, own(expected)), kTolerance);
  (y * own(factors)).pow(2).sum().backward();
  expect_counts(comm, {0, scatter ? 1 : 0, 0}, scatter ? 8 * y.numel() : 0);
  EXPECT_LE(relative_difference(x.grad(), own_columns(whole.grad(), inputs)), kTolerance);
  const auto columns = layer->sharding_of("weight");
  EXPECT_LE(relative_difference(layer->weight.grad(), columns.shard_of(reference->weight.grad())),
            kTolerance);
  if (bias) {
    EXPECT_LE(relative_difference(layer->bias.grad(), own(reference->bias.grad())), kTolerance);
  }
}

TEST(RowParallelLinear, EqualsLinearInValueAndGradients) {
  const auto comm = new_world();
  std::mt19937 generator(6);
  torch::manual_seed(6);
  for (const auto& leading : std::vector<Sizes>{{}, {5}, {0}, {2, 3}}) {
    for (const bool scatter : {false, true}) {
      SCOPED_TRACE(c10::str("leading ", leading, " scatter ", scatter));
      const auto in_sizes = testing::random_shards(8, comm->size(), generator);
      const auto out_sizes = scatter ? testing::random_shards(6, comm->size(), generator) : Sizes();
      run_row(leading, in_sizes, out_sizes, leading.size() != 1, comm);
    }
  }
}

TEST(ParallelLinear, StartsFromTheWeightsOfLinearAtAnyRankCount) {
  const auto comm = new_world();
  torch::manual_seed(11);
  nn::Linear reference(6, 9);
  ColumnParallelLinear column(ColumnParallelLinearOptions(6, 9).seed(11).communicator(comm));
  RowParallelLinear row(RowParallelLinearOptions(6, 9).seed(11).communicator(comm));
  // The bound 1 / sqrt(in) is computed by another formula: one rounding of the drawn float.
  constexpr double kRounding = 0x1p-23;
  const auto rows = column->sharding_of("weight");
  EXPECT_LE(relative_difference(column->weight, rows.shard_of(reference->weight)), kRounding);
  EXPECT_LE(relative_difference(column->bias, rows.shard_of(reference->bias)), kRounding);
  EXPECT_LE(
      relative_difference(row->weight, row->sharding_of("weight").shard_of(reference->weight)),
      kRounding);
  EXPECT_LE(relative_difference(row->bias, reference->bias), kRounding);
  EXPECT_TRUE(row->weight.requires_grad() && row->weight.is_leaf());

  const auto scaled = ColumnParallelLinearOptions(300, 200).init_std(0.02).init_scale(0.5);
  ColumnParallelLinear normal(
      ColumnParallelLinearOptions(scaled).communicator(self_communicator()));
  // 60 000 draws: the deviation of the sample is within 3 in 1000 of 0.01 (four sigma).
  EXPECT_NEAR(normal->weight.std().item<double>(), 0.01, 1.2e-4);
  EXPECT_EQ(normal->bias.abs().max().item<double>(), 0);
}

TEST(ParallelLinear, GatedUnitEqualsThePlainOneToSecondOrder) {
  const auto comm = new_world();
  constexpr int64_t kHidden = 5;
  constexpr int64_t kInner = 7;
  auto up = plain_linear(kHidden, 2 * kInner, 1);
  auto down = plain_linear(kInner, kHidden, 2);
  const auto gated = [](const Tensor& y) {
    const auto halves = y.chunk(2, -1);
    return torch::silu(halves[0]) * halves[1];
  };
  ColumnParallelLinear first(ColumnParallelLinearOptions(kHidden, 2 * kInner)
                                 .rows(gate_up_rows(kInner, comm->size()))
                                 .seed(1)
                                 .communicator(comm));
  RowParallelLinear second(RowParallelLinearOptions(kInner, kHidden).seed(2).communicator(comm));
  first->to(torch::kDouble);
  second->to(torch::kDouble);
  auto whole = torch::randn({3, kHidden}, torch::kDouble).set_requires_grad(true);
  auto x = whole.detach().clone().set_requires_grad(true);
  const auto penalty = [](const Tensor& y, const Tensor& input) {
    const auto gradient = torch::autograd::grad({y.pow(2).sum()}, {input}, {}, true, true)[0];
    return gradient.pow(2).sum();
  };
  penalty(down->forward(gated(up->forward(whole))), whole).backward();
  penalty(second->forward(gated(first->forward(x))), x).backward();
  constexpr double kSecondOrder = 1e-12;  // four products one after the other
  EXPECT_LE(relative_difference(x.grad(), whole.grad()), kSecondOrder);
  EXPECT_LE(relative_difference(first->weight.grad(),
                                first->sharding_of("weight").shard_of(up->weight.grad())),
            kSecondOrder);
  EXPECT_LE(relative_difference(second->weight.grad(),
                                second->sharding_of("weight").shard_of(down->weight.grad())),
            kSecondOrder);
}

TEST(ParallelLinear, ComputesInHalfTypes) {
  const auto comm = new_world();
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    // Sums of whole numbers below 2^8: exact in both dtypes, on any number of ranks.
    RowParallelLinear layer(
        RowParallelLinearOptions(8, 3).bias(false).scatter_output(true).communicator(comm));
    layer->to(dtype);
    {
      const torch::NoGradGuard no_grad;
      layer->weight.fill_(2);
    }
    auto x = torch::ones({4, layer->weight.size(1)}, dtype).set_requires_grad(true);
    comm->reset_counters();
    const auto y = layer->forward(x);
    EXPECT_EQ(comm->counters().bytes, 4 * 3 * 2);
    EXPECT_TRUE(torch::equal(y, torch::full({4, y.size(1)}, 16, dtype)));
    y.sum().backward();
    EXPECT_TRUE(torch::equal(x.grad(), torch::full_like(x, 6)));
  }
}

using Flat = std::vector<std::vector<std::pair<int64_t, int64_t>>>;

Flat flat(const RangesByRank& ranges) {
  Flat result;
  for (const auto& rank : ranges) {
    result.emplace_back();
    for (const auto& range : rank) result.back().emplace_back(range.offset, range.size);
  }
  return result;
}

TEST(ParallelLinear, CutsFusedWeightsByHeads) {
  // 6 query heads of width 2 over 2 key/value heads: head 1 of 3 ranks straddles both groups.
  EXPECT_EQ(
      flat(qkv_rows(6, 2, 2, 3)),
      (Flat{{{0, 4}, {12, 2}, {16, 2}}, {{4, 4}, {12, 4}, {16, 4}}, {{8, 4}, {14, 2}, {18, 2}}}));
  // More ranks than heads: the last one holds nothing.
  EXPECT_EQ(flat(qkv_rows(2, 1, 3, 3)),
            (Flat{{{0, 3}, {6, 3}, {9, 3}}, {{3, 3}, {6, 3}, {9, 3}}, {}}));
  EXPECT_EQ(flat(head_columns(3, 2, 2)), (Flat{{{0, 4}}, {{4, 2}}}));
  EXPECT_EQ(flat(gate_up_rows(3, 2)), (Flat{{{0, 2}, {3, 2}}, {{2, 1}, {5, 1}}}));
  EXPECT_THROW(qkv_rows(6, 4, 2, 2), c10::Error);
}

TEST(ParallelLinear, ErrorsNameTheLayerBeforeCommunication) {
  const auto comm = new_world();
  const auto column = [&] {
    return ColumnParallelLinearOptions(4, 6).communicator(comm).name("mlp.up");
  };
  const auto row = [&] { return RowParallelLinearOptions(4, 6).communicator(comm).name("mlp.up"); };
  const int ranks = comm->size();
  const RangesByRank everything(ranks, {{0, 6}});
  const RangesByRank outside(ranks, {{3, 4}});
  const RangesByRank partial(ranks, {{0, 5}});
  const RangesByRank twice(ranks, {{0, 6}, {2, 1}});
  const RangesByRank all_columns(ranks, {{0, 4}});
  const auto make = [](const auto& options) {
    using Options = std::decay_t<decltype(options)>;
    if constexpr (std::is_same_v<Options, ColumnParallelLinearOptions>) {
      ColumnParallelLinear layer(options);
    } else {
      RowParallelLinear layer(options);
    }
  };
  comm->reset_counters();
  std::vector<std::string> messages = {
      message_of<c10::Error>([&] { make(column().rows(outside)); }),
      message_of<c10::Error>([&] { make(column().rows(partial)); }),
      message_of<c10::Error>([&] { make(column().rows(twice)); }),
      message_of<c10::Error>([&] { make(column().rows(RangesByRank(ranks + 1))); }),
      message_of<c10::Error>([&] {
        make(column().in_shard_sizes({4, 4, 4, 4, 4}));
      }),
      message_of<c10::Error>([&] { make(row().out_shard_sizes(Sizes(ranks, 7))); }),
      message_of<c10::Error>([&] { make(column().in_features(0)); }),
  };
  if (ranks > 1) {
    messages.push_back(
        message_of<c10::Error>([&] { make(column().rows(everything).gather_output(true)); }));
    messages.push_back(message_of<c10::Error>([&] { make(row().columns(all_columns)); }));
  }
  ColumnParallelLinear layer(column());
  messages.push_back(message_of<c10::Error>([&] { layer->forward(torch::ones({2, 5})); }));
  messages.push_back(message_of<c10::Error>([&] { layer->forward(torch::ones({})); }));
  messages.push_back(message_of<c10::Error>([&] { layer->forward(Tensor()); }));
  messages.push_back(message_of<c10::Error>([&] {
    layer->forward(torch::ones({2, 4}, torch::kDouble));
  }));
  for (const auto& text : messages) EXPECT_NE(text.find("mlp.up"), std::string::npos) << text;
  EXPECT_EQ(comm->counters().collectives(), 0);
}

TEST(ParallelLinear, ClonesPrintsAndTakesItsPathAsName) {
  const auto comm = new_world();
  nn::Sequential model(ColumnParallelLinear(ColumnParallelLinearOptions(4, 6).communicator(comm)),
                       RowParallelLinear(RowParallelLinearOptions(6, 4).communicator(comm)));
  comm->reset_counters();
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model->parameters()) parameter.fill_(3);
  }
  const auto copy = std::dynamic_pointer_cast<nn::SequentialImpl>(model->clone());
  EXPECT_EQ(comm->counters().collectives(), 0);
  const auto x = torch::ones({2, 4});
  EXPECT_TRUE(torch::equal(copy->forward(x), model->forward(x)));
  EXPECT_FALSE(copy->parameters()[0].is_alias_of(model->parameters()[0]));
  name_modules(*model);
  EXPECT_EQ(model->at<ColumnParallelLinearImpl>(0).display_name(), "0");
  std::ostringstream text;
  text << *model;
  EXPECT_NE(text.str().find("RowParallelLinear(in=6, in_local="), std::string::npos) << text.str();

  const auto tensors = sharded_tensors(*model);
  ASSERT_EQ(tensors.size(), 4U);
  EXPECT_EQ(tensors[0].sharding.whole_shape(tensors[0].tensor.sizes()), (Sizes{6, 4}));
  EXPECT_EQ(tensors[2].sharding.whole_shape(tensors[2].tensor.sizes()), (Sizes{4, 6}));
  EXPECT_TRUE(tensors[3].sharding.replicated());
}

}  // namespace
}  // namespace syncnorm
