// Norms that share their collectives against plain norms of the whole tensors in double, and
// against themselves alone.
#include "syncnorm/norm_group.h"

#include <gtest/gtest.h>

#include <functional>

#include "support/batch.h"
#include "support/columns.h"
#include "support/tolerance.h"
#include "support/world.h"
#include "syncnorm/sync_batch_norm.h"
#include "syncnorm/tensor_parallel_norm.h"

namespace syncnorm {
namespace {

using testing::message_of;
using testing::new_world;
using testing::relative_difference;
using torch::Tensor;
using Tensors = std::vector<Tensor>;
using Shards = std::vector<int64_t>;

// Both sides in double, sums of some hundred terms; second derivatives have a few times more.
constexpr double kTolerance = 1e-12;
constexpr int64_t kChannels = 5, kLayer = 11, kRms = 13;
constexpr size_t kNorms = 3;

/// Which norm's output rank r uses, or which input needs a gradient there.
using Choice = std::function<bool(int rank, size_t norm)>;
bool all(int /*rank*/, size_t /*norm*/) { return true; }

Tensor leaf(const Tensor& values) { return values.detach().clone().set_requires_grad(true); }

/// A batch norm, a layer norm and an RMS norm in a group, shards drawn with `seed`, some empty.
struct Mixed {
  Mixed(std::shared_ptr<Communicator> comm_, uint64_t seed, bool affine = true)
      : comm(std::move(comm_)) {
    std::mt19937 generator(seed);
    for (const int64_t size : {int64_t{7}, kLayer, kRms})
      shards.push_back(testing::random_shards(size, comm->size(), generator));
    batch = SyncBatchNorm(
        SyncBatchNormOptions(kChannels).affine(affine).communicator(comm).name("batch"));
    layer = TensorParallelLayerNorm(TensorParallelLayerNormOptions(kLayer)
                                        .elementwise_affine(affine)
                                        .shard_sizes(shards[1])
                                        .communicator(comm)
                                        .name("layer"));
    rms = TensorParallelRMSNorm(TensorParallelRMSNormOptions(kRms)
                                    .elementwise_affine(affine)
                                    .shard_sizes(shards[2])
                                    .communicator(comm)
                                    .name("rms"));
    torch::manual_seed(seed);
    const auto draw = [](torch::IntArrayRef shape) { return torch::randn(shape, torch::kDouble); };
    x = {leaf(draw({7, kChannels, 4, 3}) + 2), leaf(draw({4, kLayer}) - 1),
         leaf(draw({2, 3, kRms}))};
    dy = {draw(x[0].sizes()), draw(x[1].sizes()), draw(x[2].sizes())};
    if (affine) {
      weight = {leaf(draw({kChannels})), leaf(draw({kLayer})), leaf(draw({kRms}))};
      bias = {leaf(draw({kChannels})), leaf(draw({kLayer})), Tensor()};
    } else {
      weight = bias = Tensors(kNorms);
    }
    to(batch, 0);
    to(layer, 1);
    to(rms, 2);
  }

  template <typename Norm>
  void to(Norm& norm, size_t i) {
    norm->to(torch::kDouble);
    const torch::NoGradGuard no_grad;
    const auto part = [&](const Tensor& whole) { return i == 0 ? whole : shard(i, whole); };
    if (norm->weight.defined()) norm->weight.copy_(part(weight[i]));
    if (norm->bias.defined()) norm->bias.copy_(part(bias[i]));
  }

  Tensor shard(size_t i, const Tensor& whole) const {
    return i == 0 ? testing::shard_of(whole.detach(), shards[0], comm->rank())
                  : testing::columns_of(whole.detach(), shards[i], comm->rank());
  }

  Tensors inputs(const Choice& needs = all) const {
    Tensors own;
    for (size_t i = 0; i < kNorms; ++i)
      own.push_back(shard(i, x[i]).set_requires_grad(needs(comm->rank(), i)));
    return own;
  }

  /// The gradient of the whole output i where ranks use it as `uses` says.
  Tensor used(size_t i, const Choice& uses) const {
    auto whole = dy[i].clone();
    int64_t at = 0;
    for (int r = 0; r < comm->size(); at += shards[i][r++])
      if (!uses(r, i)) whole.narrow(i == 0 ? 0 : -1, at, shards[i][r]).zero_();
    return whole;
  }

  Tensors expected() const {
    const auto rms_norm = at::rms_norm(
        x[2], {kRms}, weight[2].defined() ? std::optional(weight[2]) : std::nullopt, 1e-6);
    return {torch::batch_norm(x[0], weight[0], bias[0], {}, {}, true, 0.1, 1e-5, false),
            torch::layer_norm(x[1], {kLayer}, weight[1], bias[1], 1e-5), rms_norm};
  }

  void expect_affine_gradients() const {
    auto sums = torch::stack({batch->weight.grad(), batch->bias.grad()});
    comm->all_reduce(sums);
    EXPECT_LT(relative_difference(sums, torch::stack({weight[0].grad(), bias[0].grad()})),
              kTolerance);
    EXPECT_LT(relative_difference(layer->weight.grad(), shard(1, weight[1].grad())), kTolerance);
    EXPECT_LT(relative_difference(layer->bias.grad(), shard(1, bias[1].grad())), kTolerance);
    EXPECT_LT(relative_difference(rms->weight.grad(), shard(2, weight[2].grad())), kTolerance);
  }

  std::shared_ptr<Communicator> comm;
  std::vector<Shards> shards;
  SyncBatchNorm batch{nullptr};
  TensorParallelLayerNorm layer{nullptr};
  TensorParallelRMSNorm rms{nullptr};
  Tensors x, dy, weight, bias;  // whole
};

// Doubles: two of the tag; of each norm, forward, two of the header, and its sums.
constexpr int64_t kSums = 2 * kChannels + 2 * 4 + 6;
constexpr int64_t kForwardBytes = 8 * (2 + 2 * kNorms + kSums), kBackwardBytes = 8 * (2 + kSums);

void run(Mixed& mixed, const Choice& uses, const Choice& needs) {
  NormGroup group({mixed.batch, mixed.layer, mixed.rms}, "mixed");
  const auto inputs = mixed.inputs(needs);
  const auto rank = mixed.comm->rank();
  mixed.comm->reset_counters();
  const auto y = group.forward(inputs);
  EXPECT_EQ(mixed.comm->counters().all_reduce, 1);
  EXPECT_EQ(mixed.comm->counters().bytes, kForwardBytes);
  Tensors outputs, gradients;
  for (size_t i = 0; i < kNorms; ++i) {
    if (!uses(rank, i)) continue;
    outputs.push_back(y[i]);
    gradients.push_back(mixed.shard(i, mixed.dy[i]));
  }
  mixed.comm->reset_counters();
  torch::autograd::backward(outputs, gradients);
  EXPECT_EQ(mixed.comm->counters().all_reduce, 1);
  EXPECT_EQ(mixed.comm->counters().collectives(), 1);
  EXPECT_EQ(mixed.comm->counters().bytes, kBackwardBytes);

  const auto expected = mixed.expected();
  torch::autograd::backward(expected,
                            {mixed.used(0, uses), mixed.used(1, uses), mixed.used(2, uses)});
  for (size_t i = 0; i < kNorms; ++i) {
    SCOPED_TRACE("norm " + std::to_string(i));
    EXPECT_LT(relative_difference(y[i], mixed.shard(i, expected[i])), kTolerance);
    ASSERT_EQ(inputs[i].grad().defined(), needs(rank, i));
    if (needs(rank, i)) {
      EXPECT_LT(relative_difference(inputs[i].grad(), mixed.shard(i, mixed.x[i].grad())),
                kTolerance);
    }
  }
  if (mixed.weight[0].defined()) mixed.expect_affine_gradients();
}

TEST(NormGroup, EqualsTheNormsOfTheWholeTensors) {
  const auto comm = new_world();
  for (uint64_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Mixed mixed(comm, seed, seed % 3 != 2);
    run(mixed, all, all);
  }
}

TEST(NormGroup, OutputsThatOnlySomeRanksUse) {
  const auto comm = new_world();
  for (size_t only = 0; only < kNorms; ++only) {
    Mixed mixed(comm, 20 + only);
    run(
        mixed, [&](int, size_t norm) { return norm == only; }, all);
    // Alone, a norm's backward would wait for ranks that do not use its output.
    Mixed turned(comm, 30 + only);
    run(
        turned, [&](int rank, size_t norm) { return norm == (rank + only) % kNorms; }, all);
  }
}

TEST(NormGroup, RanksWhoseInputsNeedNoGradient) {
  const auto comm = new_world();
  for (const bool affine : {true, false}) {
    // The last rank needs some gradient in every case, so that there is a backward.
    const int last = comm->size() - 1;
    Mixed one_rank(comm, 40, affine);
    run(one_rank, all, [&](int rank, size_t) { return rank == last; });
    Mixed by_norm(comm, 41, affine);
    run(by_norm, all, [&](int rank, size_t norm) {
      return rank == last ? norm == 1 : norm == static_cast<size_t>(rank) % kNorms;
    });
  }
}

TEST(NormGroup, NobodyNeedsAnInputGradient) {
  const auto comm = new_world();
  Mixed mixed(comm, 45);
  NormGroup group({mixed.batch, mixed.layer, mixed.rms});
  const auto y = group.forward(mixed.inputs([](int, size_t) { return false; }));
  comm->reset_counters();
  torch::autograd::backward(
      y, {mixed.shard(0, mixed.dy[0]), mixed.shard(1, mixed.dy[1]), mixed.shard(2, mixed.dy[2])});
  EXPECT_EQ(comm->counters().collectives(), 0);
  torch::autograd::backward(mixed.expected(), mixed.dy);
  mixed.expect_affine_gradients();
}

TEST(NormGroup, DifferentiatesTwice) {
  const auto comm = new_world();
  Mixed mixed(comm, 50);
  NormGroup group({mixed.batch, mixed.layer, mixed.rms});
  const auto penalty = [](const Tensors& y, const Tensors& x, const Tensors& dy) {
    auto total = torch::zeros({}, torch::kDouble);
    for (const auto& dx : torch::autograd::grad(y, x, dy, true, /*create_graph=*/true))
      total = total + dx.square().sum();
    return total;
  };
  const auto inputs = mixed.inputs();
  penalty(group.forward(inputs), inputs,
          {mixed.shard(0, mixed.dy[0]), mixed.shard(1, mixed.dy[1]), mixed.shard(2, mixed.dy[2])})
      .backward();
  penalty(mixed.expected(), mixed.x, mixed.dy).backward();
  for (size_t i = 0; i < kNorms; ++i)
    EXPECT_LT(relative_difference(inputs[i].grad(), mixed.shard(i, mixed.x[i].grad())),
              10 * kTolerance);
}

TEST(NormGroup, EvaluationIsAppliedAndTheOthersShare) {
  const auto comm = new_world();
  Mixed mixed(comm, 60);
  SyncBatchNorm second(SyncBatchNormOptions(kChannels).communicator(comm));
  second->to(torch::kDouble);
  second->running_mean.fill_(0.5);
  second->eval();
  NormGroup group({mixed.batch, second, mixed.layer});
  const auto x = mixed.inputs();
  comm->reset_counters();
  const auto y = group.forward({x[0], x[0], x[1]});
  EXPECT_EQ(comm->counters().collectives(), 1);
  EXPECT_EQ(comm->counters().bytes, 8 * (2 + 2 * 2 + 2 * kChannels + 2 * 4));
  const auto expected = mixed.expected();
  EXPECT_LT(relative_difference(y[0], mixed.shard(0, expected[0])), kTolerance);
  EXPECT_TRUE(torch::equal(y[1], second->forward(x[0])));
  EXPECT_LT(relative_difference(y[2], mixed.shard(1, expected[1])), kTolerance);
  EXPECT_TRUE((second->running_mean == 0.5).all().item<bool>());

  mixed.batch->eval();
  NormGroup evaluated({mixed.batch, second});
  comm->reset_counters();
  (evaluated.forward({x[0], x[0]})[0].sum()).backward();
  EXPECT_EQ(comm->counters().collectives(), 0);
}

TEST(NormGroup, DtypesMayBeMixed) {
  const auto comm = new_world();
  Mixed mixed(comm, 70);
  mixed.batch->to(torch::kFloat);
  mixed.batch->options.relu(true);
  mixed.rms->to(torch::kFloat);
  NormGroup group({mixed.batch, mixed.layer, mixed.rms});
  const auto cast = [&] {
    return Tensors{leaf(mixed.shard(0, mixed.x[0]).to(torch::kHalf)),
                   leaf(mixed.shard(1, mixed.x[1])),
                   leaf(mixed.shard(2, mixed.x[2]).to(torch::kBFloat16))};
  };
  const auto x = cast(), x_alone = cast();
  const auto loss = [](const Tensor& y) { return y.to(torch::kDouble).pow(3).sum(); };
  const auto y = group.forward(x);
  (loss(y[0]) + loss(y[1]) + loss(y[2])).backward();
  const Tensors alone{mixed.batch(x_alone[0]), mixed.layer(x_alone[1]), mixed.rms(x_alone[2])};
  for (size_t i = 0; i < kNorms; ++i) {
    loss(alone[i]).backward();
    EXPECT_EQ(y[i].scalar_type(), x[i].scalar_type());
    const double near = testing::norm_tolerance(x[i].scalar_type(), kTolerance);
    EXPECT_LT(relative_difference(y[i], alone[i]), near);
    EXPECT_LT(relative_difference(x[i].grad(), x_alone[i].grad()), near);
  }
}

TEST(NormGroup, Residuals) {
  const auto comm = new_world();
  Mixed mixed(comm, 80);
  NormGroup group({mixed.batch, mixed.layer, mixed.rms});
  const auto x = mixed.inputs(), x_alone = mixed.inputs();
  const Tensors residuals{leaf(x[0] * 3 + 1), leaf(x[1].flip({0})), Tensor()};
  const Tensors theirs{leaf(residuals[0]), leaf(residuals[1]), Tensor()};
  const auto y = group.forward_residual(x, residuals);
  EXPECT_FALSE(y[0].second.defined());
  EXPECT_FALSE(y[2].second.defined());
  const auto loss = [](const std::vector<std::pair<Tensor, Tensor>>& of) {
    return of[0].first.pow(3).sum() + of[1].first.pow(3).sum() + of[1].second.square().sum() +
           of[2].first.pow(3).sum();
  };
  loss(y).backward();
  const auto alone =
      std::vector<std::pair<Tensor, Tensor>>{{mixed.batch->forward(x_alone[0], theirs[0]), {}},
                                             mixed.layer(x_alone[1], theirs[1]),
                                             {mixed.rms(x_alone[2]), {}}};
  loss(alone).backward();
  for (size_t i = 0; i < kNorms; ++i) {
    EXPECT_LT(relative_difference(y[i].first, alone[i].first), kTolerance);
    EXPECT_LT(relative_difference(x[i].grad(), x_alone[i].grad()), kTolerance);
    if (i < 2) {
      EXPECT_LT(relative_difference(residuals[i].grad(), theirs[i].grad()), kTolerance);
    }
  }
  EXPECT_TRUE(torch::equal(y[1].second, alone[1].second));
}

TEST(NormGroup, OneRowNormMayStandTwice) {
  const auto comm = new_world();
  Mixed mixed(comm, 90);
  NormGroup group({mixed.layer, mixed.layer});
  const auto x = mixed.inputs();
  const auto y = group.forward({x[1], 2 * x[1]});
  EXPECT_LT(relative_difference(y[0], mixed.layer(x[1])), kTolerance);
  EXPECT_LT(relative_difference(y[1], mixed.layer(2 * x[1])), kTolerance);
}

TEST(NormGroup, RefusesWhatDoesNotFit) {
  const auto comm = new_world();
  Mixed mixed(comm, 100);
  const auto other = new_world();
  SyncBatchNorm elsewhere(SyncBatchNormOptions(kChannels).communicator(other).name("elsewhere"));
  elsewhere->to(torch::kDouble);
  const auto x = mixed.inputs();
  const auto says = [&](const std::string& expected, auto&& body) {
    const auto message = message_of<c10::Error>(body);
    EXPECT_NE(message.find(expected), std::string::npos) << message;
  };
  NormGroup group({mixed.batch, mixed.layer}, "pair");
  says("pair: expected 2 inputs", [&] { group.forward({x[0]}); });
  says("got 2 and 1", [&] { group.forward_residual({x[0], x[1]}, {x[0]}); });
  says("layer: rank", [&] { group.forward({x[0], Tensor()}); });
  says("batch: expected 5 channels", [&] { group.forward({x[0].narrow(1, 0, 2), x[1]}); });
  says("pair: norm 0 (batch) is over", [&] {
    NormGroup({mixed.batch, mixed.layer, elsewhere}, "pair").forward({x[0], x[1], x[0]});
  });
  says("norms 0 and 2 are the same module", [&] {
    NormGroup({mixed.batch, mixed.layer, mixed.batch}, "pair");
  });
  says("at least one norm", [&] { NormGroup(std::vector<NormGroup::Member>()); });
  says("norm 0 is null", [&] { NormGroup({std::shared_ptr<SyncBatchNormImpl>()}); });
  EXPECT_EQ(comm->counters().collectives() + other->counters().collectives(), 0);
  EXPECT_EQ(mixed.batch->num_batches_tracked.item<int64_t>(), 0);
}

TEST(NormGroup, DisagreementNamesTheNorm) {
  if (new_world()->size() == 1) GTEST_SKIP() << "needs two ranks";
  const auto fails = [](const std::string& expected, auto&& change) {
    const auto comm = new_world();
    Mixed mixed(comm, 110);
    if (comm->rank() == 1) change(mixed);
    NormGroup group({mixed.batch, mixed.layer, mixed.rms}, "mixed");
    const auto message = message_of<CommunicationError>([&] { group.forward(mixed.inputs()); });
    EXPECT_NE(message.find("of mixed on"), std::string::npos) << message;
    EXPECT_NE(message.find(expected + " differs"), std::string::npos) << message;
  };
  fails("norm 1 (layer): eps", [](Mixed& mixed) { mixed.layer->options.eps(1e-3); });
  fails("norm 2 (rms): unit offset", [](Mixed& mixed) { mixed.rms->options.unit_offset(true); });
  fails("norm 0 (batch): channels", [](Mixed& mixed) { mixed.batch->eval(); });
}

}  // namespace
}  // namespace syncnorm
