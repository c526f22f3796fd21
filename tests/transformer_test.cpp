// A transformer block over ranks against one in plain operations: values, every gradient,
// collectives and bytes; all placements, norms, heads, and both kinds of residual stream.
#include "syncnorm/transformer.h"

#include <gtest/gtest.h>

#include "support/columns.h"
#include "support/plain_block.h"

namespace syncnorm {
namespace {

using testing::columns_of;
using testing::message_of;
using testing::new_world;
using testing::PlainBlock;
using testing::relative_difference;
using testing::whole_parameters;

// Both sides in double: some dozen products of sums of a hundred terms, one after the other.
constexpr double kTolerance = 1e-10;

using Options = ParallelTransformerBlockOptions;

struct Run {
  ParallelTransformerBlock block{nullptr};
  torch::Tensor x, y;
  Counters forward, backward;
};

/// The stream [..., hidden], or this rank's columns of it.
torch::Tensor stream_of(const torch::Tensor& whole, const Options& options,
                        const Communicator& comm) {
  if (options.residual() == Residual::replicated) return whole;
  const auto shards = options.hidden_shards().empty()
                          ? balanced_shards(options.hidden(), comm.size())
                          : options.hidden_shards();
  return columns_of(whole, shards, comm.rank());
}

Run run(Options options, const std::shared_ptr<Communicator>& comm, int64_t positions = 5) {
  options.communicator(comm).name("block").seed(5);
  torch::manual_seed(41);
  auto whole_x =
      torch::randn({2, positions, options.hidden()}, torch::kDouble).set_requires_grad(true);
  const auto whole_dy = torch::randn_like(whole_x);
  auto parameters = whole_parameters(options);
  // Fresh norms are all ones; other weights show what is multiplied by what.
  for (auto& [name, values] : parameters)
    if (values.dim() == 1)
      values = (values.detach() + torch::randn_like(values) * 0.2).set_requires_grad(true);
  const auto expected = PlainBlock(options, parameters).forward(whole_x);
  expected.backward(whole_dy);

  Run result;
  result.block = ParallelTransformerBlock(options);
  result.block->to(torch::kDouble);
  const auto shards = sharded_tensors(*result.block);
  {
    const torch::NoGradGuard no_grad;
    for (const auto& shard : shards) {
      const auto mine = shard.sharding.shard_of(parameters.at(shard.name).detach());
      if (shard.tensor.dim() > 1) {
        EXPECT_LT(relative_difference(shard.tensor, mine), 1e-15) << "initial " << shard.name;
      }
      shard.tensor.copy_(mine);
    }
  }
  EXPECT_EQ(shards.size(), parameters.size());
  result.x = stream_of(whole_x.detach(), options, *comm).clone().set_requires_grad(true);
  comm->reset_counters();
  result.y = result.block(result.x);
  result.forward = comm->counters();
  comm->reset_counters();
  result.y.backward(stream_of(whole_dy, options, *comm));
  result.backward = comm->counters();

  EXPECT_LT(relative_difference(result.y, stream_of(expected, options, *comm)), kTolerance);
  EXPECT_LT(relative_difference(result.x.grad(), stream_of(whole_x.grad(), options, *comm)),
            kTolerance);
  for (const auto& shard : shards) {
    EXPECT_LT(relative_difference(shard.tensor.grad(),
                                  shard.sharding.shard_of(parameters.at(shard.name).grad())),
              kTolerance)
        << shard.name;
  }
  return result;
}

class TransformerBlock
    : public ::testing::TestWithParam<std::tuple<Placement, NormKind, Residual>> {};

INSTANTIATE_TEST_SUITE_P(
    All, TransformerBlock,
    ::testing::Combine(::testing::Values(Placement::pre, Placement::post, Placement::sandwich,
                                         Placement::deepnorm),
                       ::testing::Values(NormKind::layer, NormKind::rms),
                       ::testing::Values(Residual::replicated, Residual::sharded)));

TEST_P(TransformerBlock, EqualsTheWholeBlock) {
  const auto comm = new_world();
  const auto [placement, norm, residual] = GetParam();
  auto options = Options(24, 4).placement(placement).norm(norm).residual(residual).rope_theta(100);
  if (placement == Placement::deepnorm) options.deepnorm(DeepNorm::decoder(6));
  run(options.bias(true), comm);
  // Fewer key heads than ranks, gated feed-forward, one position.
  options.kv_heads(2).activation(Activation::swiglu).intermediate(10).bias(false);
  run(options, comm, 1);
}

TEST(TransformerBlockVariants, HeadsAndNormsOfQueriesAndKeys) {
  const auto comm = new_world();
  for (const auto residual : {Residual::replicated, Residual::sharded})
    for (const auto& qk : {std::optional<QKNormSpan>(), std::optional(QKNormSpan::head),
                           std::optional(QKNormSpan::width)})
      for (const auto& [heads, kv] : {std::pair<int64_t, int64_t>{6, 2}, {3, 1}, {2, 2}}) {
        SCOPED_TRACE(::testing::Message() << heads << " heads, " << kv << " of keys");
        run(Options(12, heads)
                .kv_heads(kv)
                .head_dim(4)
                .intermediate(7)
                .residual(residual)
                .qk_norm(qk)
                .rope_theta(10000)
                .bias(heads == 3),
            comm);
      }
}

TEST(TransformerBlockVariants, SoftcapNoMaskUnevenShards) {
  const auto comm = new_world();
  std::vector<int64_t> shards(comm->size(), 0);
  shards.back() = 11;
  shards.front() += 1;
  for (const auto residual : {Residual::replicated, Residual::sharded}) {
    auto options = Options(12, 4).residual(residual).norm(NormKind::layer);
    if (residual == Residual::sharded) options.hidden_shards(shards);
    run(options.softcap(2.0), comm);
    run(options.causal(false), comm);
    run(options.softcap(std::nullopt), comm);
  }
}

TEST(TransformerBlockVariants, ShardedStreamCostsWhatMegatronsBlockCosts) {
  const auto comm = new_world();
  const int64_t hidden = 24, rows = 2 * 5, ranks = comm->size();
  const int64_t own = balanced_shards(hidden, comm->size())[comm->rank()];
  for (const auto norm : {NormKind::rms, NormKind::layer}) {
    const auto replicated = run(Options(hidden, 4).norm(norm), comm);
    for (const auto& counters : {replicated.forward, replicated.backward}) {
      EXPECT_EQ(counters.all_reduce, 2);
      EXPECT_EQ(counters.collectives(), 2);
      EXPECT_EQ(counters.bytes, 2 * 8 * rows * hidden);
    }
    // An all-reduce of n bytes moves over the wire what a reduce-scatter of n and an all-gather of
    // shards of n/P move: the counted bytes are those of the calls.
    const auto sharded = run(Options(hidden, 4).norm(norm).residual(Residual::sharded), comm);
    const int64_t words = norm == NormKind::layer ? 2 : 1;
    const int64_t parameters = norm == NormKind::layer ? 2 * own : 0;
    const int64_t gathers = 2 * 8 * (rows * own), scatters = 2 * 8 * (rows * hidden);
    for (const auto& counters : {sharded.forward, sharded.backward}) {
      EXPECT_EQ(counters.all_gather, 2);
      EXPECT_EQ(counters.reduce_scatter, 2);
      EXPECT_EQ(counters.collectives(), 4);
    }
    EXPECT_EQ(sharded.forward.bytes, gathers + scatters + 2 * 8 * (1 + words * rows + parameters));
    EXPECT_EQ(sharded.backward.bytes, gathers + scatters + 2 * 8 * words * rows * ranks);
  }
}

TEST(TransformerBlockVariants, OnePositionAtATimeFromTheCacheEqualsAllAtOnce) {
  const auto comm = new_world();
  for (const auto residual : {Residual::replicated, Residual::sharded})
    for (const auto& cap : {std::optional<double>(), std::optional(3.0)}) {
      auto options = Options(16, 4)
                         .kv_heads(2)
                         .residual(residual)
                         .rope_theta(50)
                         .softcap(cap)
                         .qk_norm(QKNormSpan::width)
                         .communicator(comm)
                         .name("block");
      ParallelTransformerBlock block(options);
      block->to(torch::kDouble);
      torch::manual_seed(2);
      const auto whole = torch::randn({3, 7, 16}, torch::kDouble);
      const auto x = stream_of(whole, options, *comm);
      const torch::NoGradGuard no_grad;
      const auto expected = block(x);
      KeyValueCache cache;
      std::vector<torch::Tensor> parts{block(x.slice(1, 0, 3), &cache)};
      for (int64_t t = 3; t < 7; ++t) parts.push_back(block(x.slice(1, t, t + 1), &cache));
      EXPECT_EQ(cache.length(), 7);
      EXPECT_LT(relative_difference(torch::cat(parts, 1), expected), 1e-12);
      KeyValueCache two;
      block(x.slice(1, 0, 3), &two);
      EXPECT_LT(relative_difference(block(x.slice(1, 3, 7), &two), expected.slice(1, 3, 7)), 1e-12);
    }
}

TEST(TransformerBlockVariants, NoPositionsNoBatch) {
  const auto comm = new_world();
  for (const auto residual : {Residual::replicated, Residual::sharded}) {
    auto options = Options(8, 2).residual(residual).communicator(comm);
    ParallelTransformerBlock block(options);
    for (const auto& shape : std::vector<std::vector<int64_t>>{{0, 3, 8}, {2, 0, 8}}) {
      auto x = stream_of(torch::zeros(shape), options, *comm).set_requires_grad(true);
      const auto y = block(x);
      EXPECT_EQ(y.sizes(), x.sizes());
      y.sum().backward();
      EXPECT_EQ(x.grad().sizes(), x.sizes());
    }
  }
}

TEST(TransformerBlockVariants, WorkInSequential) {
  const auto comm = new_world();
  const auto options = Options(8, 2).residual(Residual::sharded).communicator(comm);
  ParallelTransformerBlock block(options);
  torch::nn::Sequential net(
      block,
      ParallelAttention(
          ParallelAttentionOptions(8, 2).residual(Residual::sharded).communicator(comm)),
      ParallelMLP(ParallelMLPOptions(8, 12).residual(Residual::sharded).communicator(comm)));
  const auto x = stream_of(torch::randn({2, 3, 8}), options, *comm);
  EXPECT_EQ(net->forward(x).sizes(), x.sizes());
  const auto copy = std::dynamic_pointer_cast<ParallelTransformerBlockImpl>(block->clone());
  EXPECT_TRUE(torch::equal(copy->forward(x), block(x)));
}

TEST(TransformerBlockVariants, ConstantsOfDeepNorm) {
  // Table 1 for 18 layers, and 6 and 6.
  EXPECT_NEAR(DeepNorm::encoder(18).alpha, std::pow(36, 0.25), 1e-15);
  EXPECT_NEAR(DeepNorm::decoder(18).beta, std::pow(144, -0.25), 1e-15);
  const auto [encoder, decoder] = DeepNorm::encoder_decoder(6, 6);
  EXPECT_NEAR(encoder.alpha, 0.81 * std::pow(std::pow(6, 4) * 6, 0.0625), 1e-14);
  EXPECT_NEAR(encoder.beta, 0.87 * std::pow(std::pow(6, 4) * 6, -0.0625), 1e-14);
  EXPECT_NEAR(decoder.alpha, std::pow(18, 0.25), 1e-14);
  EXPECT_NEAR(decoder.beta, std::pow(72, -0.25), 1e-14);
}

TEST(TransformerBlockVariants, DeepNormScalesValuesOutputAndFeedForwardOnly) {
  const auto comm = new_world();
  const auto plain_options = Options(12, 3).head_dim(4).seed(3).communicator(comm).name("block");
  auto deep_options = plain_options;
  deep_options.placement(Placement::deepnorm).deepnorm(DeepNorm{2, 0.5});
  ParallelTransformerBlock plain(plain_options), deep(deep_options);
  const auto& before = plain->attention->in_proj->linear->weight;
  const auto& after = deep->attention->in_proj->linear->weight;
  const int64_t values = before.size(0) / 3;  // queries, keys, values: as many heads of each
  EXPECT_TRUE(torch::equal(after.slice(0, 0, 2 * values), before.slice(0, 0, 2 * values)));
  EXPECT_TRUE(torch::equal(after.slice(0, 2 * values), before.slice(0, 2 * values) * 0.5));
  EXPECT_TRUE(
      torch::equal(deep->attention->out_proj->weight, plain->attention->out_proj->weight * 0.5));
  EXPECT_TRUE(
      torch::equal(deep->mlp->in_proj->linear->weight, plain->mlp->in_proj->linear->weight * 0.5));
  EXPECT_TRUE(torch::equal(deep->mlp->out_proj->weight, plain->mlp->out_proj->weight * 0.5));
}

TEST(TransformerBlockVariants, RefusesWhatDoesNotFit) {
  const auto comm = new_world();
  const auto says = [&](const std::string& expected, const Options& options) {
    auto mine = options;
    const auto message =
        message_of<c10::Error>([&] { ParallelTransformerBlock(mine.communicator(comm)); });
    EXPECT_NE(message.find(expected), std::string::npos) << message;
  };
  says("a divisor of heads", Options(8, 4).kv_heads(3));
  says("give head_dim", Options(10, 4));
  says("even head_dim", Options(12, 4).rope_theta(10));
  says("rope_theta must be positive", Options(8, 2).rope_theta(0));
  says("softcap must be positive", Options(8, 4).softcap(0));
  says("DeepNorm::decoder", Options(8, 4).placement(Placement::deepnorm));
  says("placement deepnorm only", Options(8, 4).deepnorm(DeepNorm::decoder(2)));
  ParallelTransformerBlock block(Options(8, 2).communicator(comm));
  KeyValueCache cache{torch::zeros({3, 1, 2, 4}), torch::zeros({3, 1, 2, 4})};
  const auto unfit = message_of<c10::Error>([&] { block(torch::randn({2, 1, 8}), &cache); });
  EXPECT_NE(unfit.find("the cache holds keys"), std::string::npos) << unfit;
  const auto message = message_of<c10::Error>([&] { block(torch::randn({3, 8})); });
  EXPECT_NE(message.find("[batch, positions, features]"), std::string::npos) << message;
  EXPECT_EQ(comm->counters().collectives(), 0);
}

}  // namespace
}  // namespace syncnorm
