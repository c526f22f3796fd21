#include "support/world.h"
#include "syncnorm/convert.h"
#include "syncnorm/data_parallel.h"
#include "syncnorm/sampler.h"
#include "syncnorm/sync_batch_norm.h"

namespace syncnorm {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using testing::bit_equal_across;
using testing::new_world;
using testing::relative_difference;
using torch::Tensor;

constexpr int64_t kSamples = 37;
constexpr int64_t kGlobalBatch = 6;  // the seventh step of an epoch has a single sample
constexpr double kTolerance = 1e-10;

nn::Sequential small_network() {
  nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(2, 4, 3).padding(1)), nn::BatchNorm2d(4),
                     nn::ReLU(), nn::Conv2d(nn::Conv2dOptions(4, 6, 3).stride(2).bias(false)),
                     nn::BatchNorm2d(nn::BatchNorm2dOptions(6).momentum(std::nullopt)), nn::ReLU(),
                     nn::Flatten(), nn::Linear(6 * 3 * 3, 3));
  net->to(torch::kDouble);
  return net;
}

torch::optim::SGD sgd(nn::Sequential& net) {
  return torch::optim::SGD(net->parameters(),
                           torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-4));
}

struct Data {
  Data() {
    torch::manual_seed(21);
    labels = torch::randint(0, 3, {kSamples}, torch::kLong);
    images = torch::randn({kSamples, 2, 8, 8}, torch::kDouble) +
             labels.to(torch::kDouble).view({-1, 1, 1, 1}) * 0.3;
  }
  Tensor images, labels;
};

Tensor summed_loss(const Tensor& scores, const Tensor& labels) {
  return F::cross_entropy(scores, labels, F::CrossEntropyFuncOptions().reduction(torch::kSum));
}

void expect_same_state(const nn::Module& got, const nn::Module& wanted, Communicator& comm) {
  const auto parameters = wanted.named_parameters();
  for (const auto& item : got.named_parameters()) {
    EXPECT_LT(relative_difference(item.value(), parameters[item.key()]), kTolerance) << item.key();
    EXPECT_TRUE(bit_equal_across(comm, item.value())) << item.key();
  }
  const auto buffers = wanted.named_buffers();
  for (const auto& item : got.named_buffers()) {
    EXPECT_LT(relative_difference(item.value(), buffers[item.key()]), kTolerance) << item.key();
    EXPECT_TRUE(bit_equal_across(comm, item.value())) << item.key();
  }
}

TEST(Trajectory, ThirtyStepsEqualASingleProcessOnTheJoinedBatch) {
  const auto world = new_world();
  const auto statistics = new_world();
  const Data data;
  torch::manual_seed(22);
  auto alone = small_network();
  torch::manual_seed(22);
  auto net = small_network();
  convert_sync_batchnorm(net.ptr(), statistics);
  DistributedDataParallel<nn::Sequential> ddp(
      net, DistributedDataParallelOptions().communicator(world).bucket_cap_bytes(2000));
  auto optimizer = sgd(net);
  auto alone_optimizer = sgd(alone);
  DistributedBatchSampler sampler(kSamples, kGlobalBatch, world->rank(), world->size(), true, 5);
  DistributedBatchSampler joined(kSamples, kGlobalBatch, 0, 1, true, 5);
  world->reset_counters();
  int64_t empty_shards = 0;
  for (int64_t step = 0; step < 30; ++step) {
    const auto epoch = step / sampler.steps();
    sampler.set_epoch(epoch);
    joined.set_epoch(epoch);
    const auto batch = sampler.batch(step % sampler.steps());
    const auto mine = torch::tensor(batch.indices, torch::kLong);
    empty_shards += batch.indices.empty() ? 1 : 0;
    optimizer.zero_grad();
    auto loss =
        summed_loss(ddp(data.images.index_select(0, mine)), data.labels.index_select(0, mine));
    (loss * (static_cast<double>(world->size()) / static_cast<double>(batch.global_size)))
        .backward();
    optimizer.step();

    const auto all = torch::tensor(joined.batch(step % sampler.steps()).indices, torch::kLong);
    alone_optimizer.zero_grad();
    auto alone_loss = summed_loss(alone->forward(data.images.index_select(0, all)),
                                  data.labels.index_select(0, all)) /
                      batch.global_size;
    alone_loss.backward();
    alone_optimizer.step();

    auto total = loss.detach().clone();
    world->all_reduce(total);
    EXPECT_LT(relative_difference(total / batch.global_size, alone_loss), kTolerance)
        << "step " << step;
  }
  expect_same_state(*net, *alone, *world);
  EXPECT_EQ(empty_shards > 0, world->rank() > 0) << "the last step of an epoch has one sample";
  // Two layers, one collective each way; nothing but the loss on the other communicator, no
  // broadcast of buffers.
  EXPECT_EQ(statistics->counters().all_reduce, 30 * 4);
  EXPECT_EQ(statistics->counters().second_exchanges, 0);
  EXPECT_EQ(world->counters().broadcast, 0);
}

/// Gradients and buffers where statistics are shared by groups of two ranks ("nodes") only.
TEST(Trajectory, StatisticsGroupsSmallerThanTheWorld) {
  const auto world = new_world();
  const int size = world->size();
  const auto node = world->split(world->rank() / 2, world->rank());
  torch::manual_seed(23);
  auto net = small_network();
  convert_sync_batchnorm(net.ptr(), node);
  DistributedDataParallel<nn::Sequential> ddp(net,
                                              DistributedDataParallelOptions().communicator(world));
  torch::manual_seed(23);
  auto alone = small_network();
  torch::manual_seed(24);
  for (int step = 0; step < 2; ++step) {
    const auto images = torch::randn({size, 3, 2, 8, 8}, torch::kDouble);
    net->zero_grad();
    alone->zero_grad();
    ddp(images[world->rank()]).square().sum().backward();
    Tensor total = torch::zeros({}, torch::kDouble);
    for (int first = 0; first < size; first += 2) {
      const int ranks = std::min(2, size - first);
      total = total + alone->forward(images.narrow(0, first, ranks).flatten(0, 1)).square().sum();
    }
    (total / size).backward();
    const auto wanted = alone->named_parameters();
    for (const auto& item : net->named_parameters()) {
      EXPECT_LT(relative_difference(item.value().grad(), wanted[item.key()].grad()), kTolerance)
          << item.key();
      EXPECT_TRUE(bit_equal_across(*world, item.value().grad()));
    }
    EXPECT_EQ(node->counters().all_reduce, 4 * (step + 1));
  }
  for (const auto& item : net->named_buffers()) EXPECT_TRUE(bit_equal_across(*node, item.value()));
  EXPECT_EQ(bit_equal_across(*world, net->named_buffers()["1.running_mean"]), size <= 2);
}

/// Statistics collectives of backward and reductions of single parameters run at the same time on
/// two threads.
TEST(Trajectory, ManyLayersAndTinyBucketsDoNotDeadlock) {
  const auto world = new_world();
  torch::manual_seed(25);
  nn::Sequential net;
  for (int i = 0; i < 16; ++i) {
    net->push_back(nn::Conv2d(nn::Conv2dOptions(4, 4, 3).padding(1)));
    net->push_back(SyncBatchNorm(SyncBatchNormOptions(4).communicator(world)));
  }
  DistributedDataParallel<nn::Sequential> ddp(
      net, DistributedDataParallelOptions().communicator(world).bucket_cap_bytes(1));
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  for (int step = 0; step < 20; ++step) {
    // Ranks reach their collectives at different times.
    const auto x = torch::randn({1 + (world->rank() + step) % 3, 4, 6, 6});
    optimizer.zero_grad();
    ddp(x).square().sum().backward();
    optimizer.step();
  }
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(bit_equal_across(*world, item.value())) << item.key();
  }
  for (const auto& item : net->named_buffers()) {
    EXPECT_TRUE(bit_equal_across(*world, item.value())) << item.key();
  }
}

TEST(Trajectory, InputNeedsNoGradientOnSomeRanksOnly) {
  const auto world = new_world();
  const int size = world->size();
  torch::manual_seed(26);
  nn::Sequential net(SyncBatchNorm(SyncBatchNormOptions(3).communicator(world)), nn::Linear(3, 2));
  nn::Sequential alone(nn::BatchNorm1d(3), nn::Linear(3, 2));
  net->to(torch::kDouble);
  alone->to(torch::kDouble);
  {
    const torch::NoGradGuard no_grad;
    const auto from = net->named_parameters();
    for (auto& item : alone->named_parameters()) item.value().copy_(from[item.key()]);
  }
  DistributedDataParallel<nn::Sequential> ddp(net,
                                              DistributedDataParallelOptions().communicator(world));
  {
    const torch::NoGradGuard no_grad;
    const auto from = net->named_parameters();
    for (auto& item : alone->named_parameters()) item.value().copy_(from[item.key()]);
  }
  torch::manual_seed(27);
  const auto x = torch::randn({size, 4, 3}, torch::kDouble);
  auto mine = x[world->rank()].clone().set_requires_grad(world->rank() % 2 == 1);
  auto joined = x.clone().set_requires_grad(true);
  ddp(mine).pow(3).sum().backward();
  (alone->forward(joined.view({-1, 3})).pow(3).sum()).backward();
  const auto wanted = alone->named_parameters();
  for (const auto& item : net->named_parameters()) {
    EXPECT_LT(relative_difference(item.value().grad() * size, wanted[item.key()].grad()),
              kTolerance);
  }
  ASSERT_EQ(mine.grad().defined(), mine.requires_grad());
  if (mine.requires_grad()) {
    EXPECT_LT(relative_difference(mine.grad(), joined.grad()[world->rank()]), kTolerance);
  }
}

TEST(Trajectory, CheckpointedBlockCountsEachBatchOnce) {
  const auto world = new_world();
  torch::manual_seed(28);
  auto plain = small_network();
  torch::manual_seed(28);
  auto checkpointed = small_network();
  convert_sync_batchnorm(plain.ptr(), world);
  convert_sync_batchnorm(checkpointed.ptr(), world);
  torch::manual_seed(29 + world->rank());
  for (int step = 0; step < 2; ++step) {
    const auto x = torch::randn({3, 2, 8, 8}, torch::kDouble);
    plain->forward(x).square().sum().backward();
    Tensor y;
    {
      const torch::NoGradGuard no_grad;
      y = checkpointed->forward(x);
    }
    const FreezeRunningStatsGuard recomputing;
    const auto again = checkpointed->forward(x);
    EXPECT_LT(relative_difference(y, again), 1e-12);
    again.square().sum().backward();
  }
  const auto buffers = plain->named_buffers();
  for (const auto& item : checkpointed->named_buffers()) {
    EXPECT_TRUE(torch::equal(item.value(), buffers[item.key()])) << item.key();
  }
  const auto parameters = plain->named_parameters();
  for (const auto& item : checkpointed->named_parameters()) {
    EXPECT_LT(relative_difference(item.value().grad(), parameters[item.key()].grad()), kTolerance);
  }
}

}  // namespace
}  // namespace syncnorm
