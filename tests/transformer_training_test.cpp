// Training whole small language models over ranks: the same trajectory as on one, also with tensor
// and data parallelism together, clipping and checkpoints in between.
#include <gtest/gtest.h>

#include "support/columns.h"
#include "syncnorm/data_parallel.h"
#include "syncnorm/parameters.h"
#include "syncnorm/transformer.h"
#include "syncnorm/vocab_parallel.h"

namespace syncnorm {
namespace {

using testing::bit_equal_across;
using testing::new_world;
using testing::relative_difference;

constexpr int64_t kVocabulary = 13, kHidden = 12, kPositions = 6, kBatch = 4;

struct Setting {
  Placement placement = Placement::pre;
  NormKind norm = NormKind::rms;
  Residual residual = Residual::sharded;
  std::optional<QKNormSpan> qk_norm;
};

/// Two blocks between an embedding and a head, all split over `comm`.
struct ModelImpl : torch::nn::Module {
  ModelImpl(const Setting& setting, const std::shared_ptr<Communicator>& comm) {
    const bool sharded = setting.residual == Residual::sharded;
    embedding = register_module(
        "embedding", VocabParallelEmbedding(VocabParallelEmbeddingOptions(kVocabulary, kHidden)
                                                .scatter_output(sharded)
                                                .seed(1)
                                                .communicator(comm)));
    for (int i = 0; i < 2; ++i) {
      auto options = ParallelTransformerBlockOptions(kHidden, 3)
                         .kv_heads(1)
                         .head_dim(4)
                         .intermediate(20)
                         .activation(Activation::swiglu)
                         .placement(setting.placement)
                         .norm(setting.norm)
                         .residual(setting.residual)
                         .qk_norm(setting.qk_norm)
                         .rope_theta(100)
                         .bias(true)
                         .seed(10 + i)
                         .communicator(comm);
      if (setting.placement == Placement::deepnorm) options.deepnorm(DeepNorm::decoder(2));
      blocks.push_back(
          register_module("block" + std::to_string(i), ParallelTransformerBlock(options)));
    }
    head = register_module(
        "head", NormColumnParallelLinear(NormColumnParallelLinearOptions(kHidden, kVocabulary)
                                             .norm(setting.norm)
                                             .residual(setting.residual)
                                             .bias(false)
                                             .seed(20)
                                             .communicator(comm)));
    to(torch::kDouble);
  }

  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embedding(tokens);
    for (auto& block : blocks) x = block(x);
    return head(x);
  }

  VocabParallelEmbedding embedding{nullptr};
  std::vector<ParallelTransformerBlock> blocks;
  NormColumnParallelLinear head{nullptr};
};
TORCH_MODULE(Model);

/// Tokens of one step, of the whole batch.
std::pair<torch::Tensor, torch::Tensor> batch_of(int step) {
  torch::manual_seed(100 + step);
  const auto tokens = torch::randint(kVocabulary, {kBatch, kPositions + 1}, torch::kLong);
  return {tokens.slice(1, 0, kPositions), tokens.slice(1, 1)};
}

struct Trajectory {
  std::vector<double> losses, norms;
  Model model{nullptr};
};

/// Steps of AdamW with clipping, over `tensor` ranks a replica and `data` replicas.
Trajectory train(const Setting& setting, const std::shared_ptr<Communicator>& tensor,
                 const std::shared_ptr<Communicator>& data, int steps) {
  Trajectory result;
  result.model = Model(setting, tensor);
  DistributedDataParallel<Model> model(result.model,
                                       DistributedDataParallelOptions().communicator(data));
  torch::optim::AdamW optimizer(result.model->parameters(), torch::optim::AdamWOptions(3e-3));
  const auto shard = balanced_shards(kBatch, data->size());
  const int64_t first = data->rank() * shard[0];  // the replica counts here divide the batch
  for (int step = 0; step < steps; ++step) {
    const auto [tokens, targets] = batch_of(step % 5);
    const auto mine = [&](const torch::Tensor& whole) {
      return whole.slice(0, first, first + shard[data->rank()]).contiguous();
    };
    optimizer.zero_grad();
    const auto loss =
        vocab_parallel_cross_entropy(model(mine(tokens)), mine(targets),
                                     VocabParallelCrossEntropyOptions()
                                         .shard_sizes(balanced_shards(kVocabulary, tensor->size()))
                                         .communicator(tensor));
    loss.backward();
    result.norms.push_back(clip_grad_norm(*result.model, 0.5, tensor));
    optimizer.step();
    auto mean = loss.detach() / data->size();
    data->all_reduce(mean);
    result.losses.push_back(mean.item<double>());
  }
  return result;
}

// Thirty steps of AdamW: rounding of 1e-16 grows about a hundredfold a few times.
constexpr double kTolerance = 1e-9;

void expect_same(const Trajectory& mine, const Trajectory& alone) {
  for (size_t i = 0; i < alone.losses.size(); ++i) {
    EXPECT_NEAR(mine.losses[i], alone.losses[i], kTolerance * alone.losses[i]) << "step " << i;
    EXPECT_NEAR(mine.norms[i], alone.norms[i], kTolerance * alone.norms[i]) << "step " << i;
  }
  const auto whole = alone.model->named_parameters();
  for (const auto& shard : sharded_tensors(*mine.model)) {
    EXPECT_LT(relative_difference(shard.tensor, shard.sharding.shard_of(whole[shard.name])),
              kTolerance)
        << shard.name;
  }
}

TEST(TransformerTraining, ThirtyStepsEqualThoseOfOneProcess) {
  const auto comm = new_world();
  const std::vector<Setting> settings{
      {Placement::sandwich, NormKind::rms, Residual::sharded, QKNormSpan::head},
      {Placement::pre, NormKind::layer, Residual::sharded, QKNormSpan::width},
      {Placement::post, NormKind::layer, Residual::replicated, std::nullopt},
      {Placement::deepnorm, NormKind::layer, Residual::sharded, std::nullopt}};
  for (const auto& setting : settings) {
    SCOPED_TRACE(&setting - settings.data());
    const auto alone = train(setting, self_communicator(), self_communicator(), 30);
    const auto mine = train(setting, comm, self_communicator(), 30);
    expect_same(mine, alone);
    EXPECT_LT(alone.losses.back(), 0.9 * alone.losses.front());
    for (const auto& shard : sharded_tensors(*mine.model))
      if (shard.sharding.replicated()) {
        EXPECT_LT(relative_difference(shard.tensor, alone.model->named_parameters()[shard.name]),
                  kTolerance);
      }
  }
}

TEST(TransformerTraining, TensorTimesDataParallel) {
  const auto world = new_world();
  if (world->size() % 2 != 0) GTEST_SKIP() << "needs an even number of ranks";
  for (const auto residual : {Residual::sharded, Residual::replicated}) {
    const Setting setting{Placement::pre, NormKind::rms, residual, QKNormSpan::head};
    const auto alone = train(setting, self_communicator(), self_communicator(), 30);
    // Replicas of two ranks, then of one, then of all.
    for (const int replicas : {world->size() / 2, world->size()}) {
      const int each = world->size() / replicas;
      const auto tensor = world->split(world->rank() / each, world->rank());
      const auto data = world->split(world->rank() % each, world->rank());
      const auto mine = train(setting, tensor, data, 30);
      expect_same(mine, alone);
      for (const auto& parameter : mine.model->parameters())
        EXPECT_TRUE(bit_equal_across(*data, parameter));
    }
  }
}

}  // namespace
}  // namespace syncnorm
