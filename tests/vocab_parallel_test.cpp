// Embedding and cross-entropy over a split vocabulary against torch::nn's on one process, in
// double.
#include "syncnorm/vocab_parallel.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "support/batch.h"
#include "support/columns.h"
#include "support/world.h"

namespace syncnorm {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using testing::bit_equal_across;
using testing::columns_of;
using testing::message_of;
using testing::new_world;
using testing::relative_difference;
using torch::Tensor;

// Sums of a few dozen terms of order one, in another order: some units of 2^-53 each.
constexpr double kTolerance = 1e-13;

using Comm = std::shared_ptr<Communicator>;
using Sizes = std::vector<int64_t>;

void expect_counts(const Comm& comm, const Sizes& counts, int64_t bytes) {
  const auto& c = comm->counters();
  EXPECT_EQ((Sizes{c.all_reduce, c.all_gather, c.reduce_scatter}), counts);
  EXPECT_EQ(c.bytes, bytes);
  comm->reset_counters();
}

TEST(VocabParallelEmbedding, EqualsEmbeddingInValueAndGradients) {
  const auto comm = new_world();
  std::mt19937 generator(1);
  torch::manual_seed(1);
  for (const auto& shape : std::vector<Sizes>{{}, {7}, {0}, {3, 4}}) {
    for (const bool scatter : {false, true}) {
      SCOPED_TRACE(c10::str("tokens ", shape, " scatter ", scatter));
      const auto shards = testing::random_shards(9, comm->size(), generator);
      const auto out = testing::random_shards(5, comm->size(), generator);
      VocabParallelEmbedding layer(VocabParallelEmbeddingOptions(9, 5)
                                       .shard_sizes(shards)
                                       .scatter_output(scatter)
                                       .out_shard_sizes(out)
                                       .seed(8)
                                       .communicator(comm));
      layer->to(torch::kDouble);
      const auto tokens = torch::randint(9, shape, torch::kLong);
      const auto dy = torch::randn(5, torch::kDouble);
      torch::manual_seed(8);
      nn::Embedding reference(9, 5);
      reference->to(torch::kDouble);
      const auto expected = reference->forward(tokens);
      (expected * dy).pow(2).sum().backward();

      const auto own = [&](const Tensor& t) {
        return scatter ? columns_of(t, out, comm->rank()) : t;
      };
      comm->reset_counters();
      const auto y = layer->forward(tokens);
      expect_counts(comm, {scatter ? 0 : 1, 0, scatter ? 1 : 0}, 8 * expected.numel());
      EXPECT_TRUE(torch::equal(y, own(expected)));
      (y * own(dy)).pow(2).sum().backward();
      expect_counts(comm, {0, scatter ? 1 : 0, 0}, scatter ? 8 * y.numel() : 0);
      const auto rows = layer->sharding_of("weight");
      EXPECT_LE(relative_difference(layer->weight.grad(), rows.shard_of(reference->weight.grad())),
                kTolerance);
    }
  }
}

TEST(VocabParallelEmbedding, ErrorsNameTheTokenBeforeCommunication) {
  const auto comm = new_world();
  VocabParallelEmbedding layer(
      VocabParallelEmbeddingOptions(6, 2).communicator(comm).name("embed"));
  comm->reset_counters();
  const auto above = message_of<c10::Error>([&] { layer->forward(torch::tensor({1, 6, 2})); });
  EXPECT_NE(above.find("embed: token 6 (element 1 of shape [3])"), std::string::npos) << above;
  const auto below = message_of<c10::Error>([&] { layer->forward(torch::tensor({-1})); });
  EXPECT_NE(below.find("token -1"), std::string::npos) << below;
  const auto dtype = message_of<c10::Error>([&] { layer->forward(torch::ones({2})); });
  EXPECT_NE(dtype.find("int64"), std::string::npos) << dtype;
  const auto shards = message_of<c10::Error>([&] {
    VocabParallelEmbedding(
        VocabParallelEmbeddingOptions(6, 2).shard_sizes({1, 1, 1, 1, 1}).communicator(comm));
  });
  EXPECT_NE(shards.find("shard_sizes"), std::string::npos) << shards;
  EXPECT_EQ(comm->counters().collectives(), 0);
  std::ostringstream text;
  text << *layer;
  EXPECT_NE(text.str().find("VocabParallelEmbedding(6, 2, tokens_local="), std::string::npos);
}

Tensor plain_entropy(const Tensor& logits, const Tensor& targets, int64_t ignored) {
  return F::cross_entropy(logits.reshape({targets.numel(), logits.size(-1)}), targets.reshape({-1}),
                          F::CrossEntropyFuncOptions().ignore_index(ignored));
}

TEST(VocabParallelCrossEntropy, EqualsCrossEntropyToSecondOrder) {
  const auto comm = new_world();
  std::mt19937 generator(2);
  torch::manual_seed(2);
  for (const auto& shape : std::vector<Sizes>{{7}, {2, 3}, {}, {1}}) {
    for (const int64_t ignored : {-100, 3}) {
      SCOPED_TRACE(c10::str("targets ", shape, " ignoring ", ignored));
      const auto sizes = testing::random_shards(6, comm->size(), generator);
      auto with_classes = shape;
      with_classes.push_back(6);
      auto targets = torch::randint(6, shape, torch::kLong);
      targets.view({-1})[0] = 4;
      if (targets.numel() > 1) targets.view({-1})[1] = ignored;
      auto whole = (torch::randn(with_classes, torch::kDouble) * 5).set_requires_grad(true);
      auto logits = columns_of(whole.detach(), sizes, comm->rank()).set_requires_grad(true);
      const auto options =
          VocabParallelCrossEntropyOptions().ignore_index(ignored).shard_sizes(sizes).communicator(
              comm);
      const auto expected = plain_entropy(whole, targets, ignored);
      comm->reset_counters();
      const auto loss = vocab_parallel_cross_entropy(logits, targets, options);
      expect_counts(comm, {0, 1, 0}, 3 * 8 * targets.numel());
      EXPECT_LE(relative_difference(loss, expected), kTolerance);
      EXPECT_TRUE(bit_equal_across(*comm, loss.reshape({1})));

      // The loss is squared, so that its own gradient counts in the second order too.
      const auto gradient = torch::autograd::grad({expected.pow(2)}, {whole}, {}, true, true)[0];
      comm->reset_counters();
      const auto plain = torch::autograd::grad({loss.pow(2)}, {logits}, {}, true)[0];
      expect_counts(comm, {0, 0, 0}, 0);
      const auto own = torch::autograd::grad({loss.pow(2)}, {logits}, {}, true, true)[0];
      expect_counts(comm, {1, 0, 0}, 8 * targets.numel());
      EXPECT_LE(relative_difference(plain, columns_of(gradient, sizes, comm->rank())), kTolerance);
      EXPECT_LE(relative_difference(own, plain), kTolerance);

      const auto second = torch::autograd::grad({gradient.pow(2).sum()}, {whole})[0];
      const auto own_second = torch::autograd::grad({own.pow(2).sum()}, {logits})[0];
      EXPECT_LE(relative_difference(own_second, columns_of(second, sizes, comm->rank())),
                10 * kTolerance);
    }
  }
}

TEST(VocabParallelCrossEntropy, KeepsItsDigitsAndInfinities) {
  const auto comm = new_world();
  const auto sizes = balanced_shards(5, comm->size());
  const auto options = VocabParallelCrossEntropyOptions().num_classes(5).communicator(comm);
  const double inf = std::numeric_limits<double>::infinity();
  // Large logits, a class ruled out, a row whose first shard is ruled out, equal logits.
  const auto whole = torch::tensor({{1e4, 1e4 - 1, -1e4, 0.0, 3.0},
                                    {0.0, -inf, 2.0, -inf, 1.0},
                                    {-inf, -inf, -inf, 1.0, 1.5},
                                    {-7e3, -7e3, -7e3, -7e3, -7e3}},
                                   torch::kDouble);
  const auto targets = torch::tensor({1, 2, 4, 0});
  auto x = whole.clone().set_requires_grad(true);
  auto logits = columns_of(whole, sizes, comm->rank()).set_requires_grad(true);
  const auto expected = plain_entropy(x, targets, -100);
  const auto loss = vocab_parallel_cross_entropy(logits, targets, options);
  EXPECT_LE(relative_difference(loss, expected), kTolerance);
  expected.backward();
  loss.backward();
  EXPECT_LE(relative_difference(logits.grad(), columns_of(x.grad(), sizes, comm->rank())),
            kTolerance);

  const auto none =
      vocab_parallel_cross_entropy(logits, torch::full({4}, -100, torch::kLong), options);
  EXPECT_TRUE(std::isnan(none.item<double>()));
  const auto empty = vocab_parallel_cross_entropy(logits.narrow(0, 0, 0),
                                                  torch::empty({0}, torch::kLong), options);
  EXPECT_TRUE(std::isnan(empty.item<double>()));
}

TEST(VocabParallelCrossEntropy, AccumulatesHalfTypesInFloat) {
  const auto comm = new_world();
  torch::manual_seed(3);
  const auto sizes = balanced_shards(50, comm->size());
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kFloat}) {
    const auto whole = (torch::randn({200, 50}) * 4).to(dtype);
    const auto targets = torch::randint(50, {200}, torch::kLong);
    auto x = whole.to(torch::kDouble).set_requires_grad(true);
    auto logits = columns_of(whole, sizes, comm->rank()).set_requires_grad(true);
    const auto expected = plain_entropy(x, targets, -100);
    comm->reset_counters();
    const auto loss = vocab_parallel_cross_entropy(
        logits, targets, VocabParallelCrossEntropyOptions().shard_sizes(sizes).communicator(comm));
    expect_counts(comm, {0, 1, 0}, 3 * 4 * 200);
    EXPECT_EQ(loss.scalar_type(), torch::kFloat);
    // A few roundings of 2^-24 of terms below 32, hardly any of which add up.
    EXPECT_LE(relative_difference(loss, expected), 4e-7);
    expected.backward();
    loss.backward();
    EXPECT_EQ(logits.grad().scalar_type(), dtype);
    // One rounding of gradients of at most 1 / 200; small ones of half are subnormal, 2^-25.
    const double rounding = dtype == torch::kFloat ? 1e-8 : 0.005 * 0x1p-8;
    EXPECT_LE(relative_difference(logits.grad(), columns_of(x.grad(), sizes, comm->rank())),
              rounding);
  }
}

TEST(VocabParallelCrossEntropy, ErrorsNameTheTargetBeforeCommunication) {
  const auto comm = new_world();
  const auto sizes = testing::ones(comm->size());
  const auto options =
      VocabParallelCrossEntropyOptions().shard_sizes(sizes).communicator(comm).name("head");
  const auto logits = torch::zeros({2, 1});
  comm->reset_counters();
  const auto target = message_of<c10::Error>([&] {
    vocab_parallel_cross_entropy(logits, torch::tensor({0, 77}), options);
  });
  EXPECT_NE(target.find("head: target 77 (element 1 of shape [2])"), std::string::npos) << target;
  for (const auto& text : {
           message_of<c10::Error>(
               [&] { vocab_parallel_cross_entropy(logits, torch::tensor({0}), options); }),
           message_of<c10::Error>([&] {
             vocab_parallel_cross_entropy(torch::zeros({2, 2}), torch::tensor({0, 0}), options);
           }),
           message_of<c10::Error>(
               [&] { vocab_parallel_cross_entropy(logits, torch::zeros({2}), options); }),
       }) {
    EXPECT_NE(text.find("head"), std::string::npos) << text;
  }
  if (comm->size() > 1) {
    const auto unknown = message_of<c10::Error>([&] {
      vocab_parallel_cross_entropy(logits, torch::tensor({0, 0}),
                                   VocabParallelCrossEntropyOptions().communicator(comm));
    });
    EXPECT_NE(unknown.find("num_classes"), std::string::npos) << unknown;
  }
  EXPECT_EQ(comm->counters().collectives(), 0);
}

}  // namespace
}  // namespace syncnorm
