#include "syncnorm/data_parallel.h"

#include <sstream>

#include "support/world.h"
#include "syncnorm/sync_batch_norm.h"

namespace syncnorm {
namespace {

namespace nn = torch::nn;
using testing::bit_equal_across;
using testing::message_of;
using testing::new_world;
using testing::relative_difference;
using torch::Tensor;

DistributedDataParallelOptions over(const std::shared_ptr<Communicator>& comm) {
  return DistributedDataParallelOptions().communicator(comm);
}

nn::Sequential linear_net() {
  return nn::Sequential(nn::Linear(5, 7), nn::Tanh(), nn::Linear(7, 3));
}

void make_double(nn::Module& module) { module.to(torch::kDouble); }

/// Copies parameters and buffers of `from` into `to`, which has the same.
void copy_state(const nn::Module& from, nn::Module& to) {
  const torch::NoGradGuard no_grad;
  const auto parameters = from.named_parameters();
  for (auto& item : to.named_parameters()) item.value().copy_(parameters[item.key()]);
  const auto buffers = from.named_buffers();
  for (auto& item : to.named_buffers()) item.value().copy_(buffers[item.key()]);
}

/// Rows of `whole` for this rank, unevenly: rank r takes r + 1 rows in turn.
Tensor shard(const Tensor& whole, const Communicator& comm) {
  const int rank = comm.rank();
  return whole.narrow(0, rank * (rank + 1) / 2, rank + 1);
}

int64_t rows_of_all(int size) { return int64_t{size} * (size + 1) / 2; }

TEST(DistributedDataParallel, StartsFromRankZerosStateAndNamesLayers) {
  const auto world = new_world();
  torch::manual_seed(world->rank());
  nn::Sequential net(nn::Linear(3, 4), nn::BatchNorm1d(4), SyncBatchNorm(4));
  net->ptr(1)->as<nn::BatchNorm1d>()->running_mean.fill_(world->rank() + 5);
  net->ptr(1)->as<nn::BatchNorm1d>()->num_batches_tracked.fill_(world->rank() + 2);
  net->ptr(0)->as<nn::Linear>()->bias.set_requires_grad(false);
  const DistributedDataParallel<nn::Sequential> ddp(net, over(world));
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(bit_equal_across(*world, item.value())) << item.key();
  }
  EXPECT_TRUE((net->ptr(1)->as<nn::BatchNorm1d>()->running_mean == 5).all().item<bool>());
  EXPECT_EQ(net->ptr(1)->as<nn::BatchNorm1d>()->num_batches_tracked.item<int64_t>(), 2);
  EXPECT_EQ(net->ptr(2)->as<SyncBatchNorm>()->options.name(), "2");
}

TEST(DistributedDataParallel, AveragesGradientsOfUnevenAndEmptyShards) {
  const auto world = new_world();
  const int size = world->size();
  for (const bool views : {false, true}) {
    torch::manual_seed(3);
    auto net = linear_net();
    make_double(*net);
    auto alone = linear_net();
    make_double(*alone);
    copy_state(*net, *alone);
    DistributedDataParallel<nn::Sequential> ddp(
        net, over(world).bucket_cap_bytes(64).gradient_as_bucket_view(views));
    for (int step = 0; step < 3; ++step) {
      const auto x = torch::randn({rows_of_all(size), 5}, torch::kDouble);
      // In the second step the last rank has nothing.
      const bool nothing = step == 1 && world->rank() == size - 1;
      const auto mine = nothing ? x.narrow(0, 0, 0) : shard(x, *world);
      const auto everything = step == 1 ? x.narrow(0, 0, rows_of_all(size - 1)) : x;
      net->zero_grad();
      alone->zero_grad();
      ddp(mine).square().sum().backward();
      (alone->forward(everything).square().sum() / size).backward();
      const auto wanted = alone->named_parameters();
      for (const auto& item : net->named_parameters()) {
        if (size == 1 && step == 1) {
          EXPECT_EQ(item.value().grad().abs().max().item<double>(), 0);
          continue;
        }
        EXPECT_LT(relative_difference(item.value().grad(), wanted[item.key()].grad()), 1e-13)
            << item.key() << " step " << step;
        EXPECT_TRUE(bit_equal_across(*world, item.value().grad()));
      }
    }
  }
}

TEST(DistributedDataParallel, NoSyncAccumulatesLocallyThenReducesTheSum) {
  const auto world = new_world();
  const int size = world->size();
  torch::manual_seed(4);
  auto net = linear_net();
  make_double(*net);
  auto alone = linear_net();
  make_double(*alone);
  copy_state(*net, *alone);
  DistributedDataParallel<nn::Sequential> ddp(net, over(world).bucket_cap_bytes(64));
  for (int round = 0; round < 3; ++round) {
    const auto x = torch::randn({3, size, 5}, torch::kDouble);
    net->zero_grad();
    alone->zero_grad();
    {
      const auto guard = ddp.no_sync();
      for (int micro = 0; micro < 2; ++micro)
        ddp(x[micro][world->rank()]).square().sum().backward();
    }
    const auto local = net->parameters()[0].grad().clone();
    EXPECT_EQ(bit_equal_across(*world, local), size == 1) << "no_sync communicated";
    ddp(x[2][world->rank()]).square().sum().backward();
    (alone->forward(x.view({-1, 5})).square().sum() / size).backward();
    const auto wanted = alone->named_parameters();
    for (const auto& item : net->named_parameters()) {
      EXPECT_LT(relative_difference(item.value().grad(), wanted[item.key()].grad()), 1e-13);
      EXPECT_TRUE(bit_equal_across(*world, item.value().grad()));
    }
  }
}

struct BranchesImpl : nn::Module {
  BranchesImpl() {
    common = register_module("common", nn::Linear(3, 3));
    branch = register_module("branch", nn::Linear(3, 3));
  }
  std::tuple<Tensor, std::vector<Tensor>> forward(const Tensor& x, bool with_branch) {
    const auto y = common(x);
    std::vector<Tensor> more;
    if (with_branch) more.push_back(branch(y));
    return {y, more};
  }
  nn::Linear common{nullptr}, branch{nullptr};
};
TORCH_MODULE(Branches);

Tensor loss_of(const std::tuple<Tensor, std::vector<Tensor>>& outputs) {
  auto loss = std::get<0>(outputs).sum();
  for (const auto& tensor : std::get<1>(outputs)) loss = loss + tensor.square().sum();
  return loss;
}

TEST(DistributedDataParallel, FindsParametersUnusedOnOneRankOnly) {
  const auto world = new_world();
  const int size = world->size();
  torch::manual_seed(5);
  Branches net;
  make_double(*net);
  Branches alone;
  make_double(*alone);
  copy_state(*net, *alone);
  DistributedDataParallel<Branches> ddp(
      net, over(world).find_unused_parameters(true).bucket_cap_bytes(8));
  for (int step = 0; step < 3; ++step) {
    const auto x = torch::randn({size, 2, 3}, torch::kDouble);
    net->zero_grad();
    alone->zero_grad();
    const auto takes_branch = [&](int rank) { return rank != step % size; };
    loss_of(ddp(x[world->rank()], takes_branch(world->rank()))).backward();
    Tensor total = torch::zeros({}, torch::kDouble);
    for (int r = 0; r < size; ++r) total = total + loss_of(alone->forward(x[r], takes_branch(r)));
    (total / size).backward();
    const auto wanted = alone->named_parameters();
    for (const auto& item : net->named_parameters()) {
      const auto& expected = wanted[item.key()].grad();
      ASSERT_EQ(item.value().grad().defined(), expected.defined()) << item.key();
      if (!expected.defined()) continue;
      EXPECT_LT(relative_difference(item.value().grad(), expected), 1e-13) << item.key();
      EXPECT_TRUE(bit_equal_across(*world, item.value().grad()));
    }
  }
}

TEST(DistributedDataParallel, UnreachedParameterIsAClearErrorAtTheNextForward) {
  const auto world = new_world();
  Branches net;
  DistributedDataParallel<Branches> ddp(net, over(world));
  const auto x = torch::randn({2, 3});
  loss_of(ddp(x, false)).backward();
  const auto message = message_of<c10::Error>([&] { ddp(x, true); });
  EXPECT_NE(message.find("Expected to have finished reduction in the prior iteration"),
            std::string::npos)
      << message;
  EXPECT_NE(message.find("branch.weight"), std::string::npos) << message;
}

TEST(DistributedDataParallel, ForwardWithoutBackwardIsAllowed) {
  const auto world = new_world();
  torch::manual_seed(6);
  auto net = linear_net();
  DistributedDataParallel<nn::Sequential> ddp(net, over(world));
  const auto x = torch::randn({2, 5});
  for (int step = 0; step < 3; ++step) {
    ddp(x);
    ddp(x * (world->rank() + 1)).sum().backward();
    EXPECT_TRUE(bit_equal_across(*world, net->parameters()[0].grad()));
  }
}

TEST(DistributedDataParallel, SharedParametersAreReducedOnce) {
  const auto world = new_world();
  const auto tied = std::make_shared<nn::LinearImpl>(4, 4);
  nn::Sequential net;
  net->push_back(tied);
  net->push_back(tied);
  DistributedDataParallel<nn::Sequential> ddp(net, over(world));
  for (int step = 0; step < 2; ++step) {
    net->zero_grad();
    ddp(torch::full({1, 4}, world->rank() + 1.0)).sum().backward();
    EXPECT_TRUE(bit_equal_across(*world, tied->weight.grad()));
  }
}

TEST(DistributedDataParallel, FrozenModuleNeedsNoReduction) {
  const auto world = new_world();
  torch::manual_seed(world->rank());
  auto net = linear_net();
  for (auto& parameter : net->parameters()) parameter.set_requires_grad(false);
  DistributedDataParallel<nn::Sequential> ddp(net, over(world));
  EXPECT_TRUE(bit_equal_across(*world, ddp(torch::ones({1, 5}))));
}

TEST(DistributedDataParallel, BroadcastsBuffersOfOtherModulesInTrainingOnly) {
  const auto world = new_world();
  nn::Sequential net(nn::BatchNorm1d(3),
                     SyncBatchNorm(SyncBatchNormOptions(3).communicator(new_world())));
  DistributedDataParallel<nn::Sequential> ddp(net, over(world));
  const auto& mean = net->ptr(0)->as<nn::BatchNorm1d>()->running_mean;
  const auto x = torch::randn({4, 3}) + world->rank();
  world->reset_counters();
  ddp(x).sum().backward();
  EXPECT_EQ(world->counters().broadcast, 2) << "floats and the counter, coalesced";
  EXPECT_EQ(bit_equal_across(*world, mean), world->size() == 1);
  world->reset_counters();
  net->eval();
  ddp(x);
  {
    net->train();
    const torch::NoGradGuard no_grad;
    ddp(x);
  }
  {
    const auto guard = ddp.no_sync();
    ddp(x).sum().backward();
  }
  EXPECT_EQ(world->counters().collectives(), 0);
  const auto momentum = 0.1;
  auto expected = mean.clone();
  world->broadcast(expected, 0);
  expected = expected * (1 - momentum) + x.mean(0) * momentum;
  ddp(x).sum().backward();
  EXPECT_LT(relative_difference(mean, expected), 1e-6);
}

TEST(DistributedDataParallel, BroadcastsNoBuffersOfSyncBatchNormOrWhenToldNotTo) {
  const auto world = new_world();
  nn::Sequential synced(SyncBatchNorm(SyncBatchNormOptions(3).communicator(new_world())));
  nn::Sequential plain(nn::BatchNorm1d(3));
  DistributedDataParallel<nn::Sequential> first(synced, over(world));
  DistributedDataParallel<nn::Sequential> second(plain, over(world).broadcast_buffers(false));
  world->reset_counters();
  for (int step = 0; step < 3; ++step) {
    first(torch::randn({4, 3})).sum().backward();
    second(torch::randn({4, 3})).sum().backward();
  }
  EXPECT_EQ(world->counters().collectives(), 0);
}

std::string refusal(const std::shared_ptr<Communicator>& comm, nn::Sequential net,
                    const DistributedDataParallelOptions& options) {
  return message_of<c10::Error>([&] { DistributedDataParallel<nn::Sequential>(net, options); }) +
         (comm->counters().broadcast > 0 ? "BROADCAST" : "");
}

TEST(DistributedDataParallel, DifferentModulesAreAnErrorThatNamesTheParameterOnEveryRank) {
  const auto world = new_world();
  if (world->size() == 1) GTEST_SKIP() << "needs ranks that can differ";
  const bool odd = world->rank() == world->size() - 1;
  const auto expect = [&](nn::Sequential net, const std::string& part) {
    const auto message = refusal(world, net, over(world));
    EXPECT_NE(message.find(part), std::string::npos) << message;
    EXPECT_NE(message.find("rank " + std::to_string(world->size() - 1)), std::string::npos)
        << message;
    EXPECT_EQ(message.find("BROADCAST"), std::string::npos);
  };
  expect(nn::Sequential(nn::Linear(3, 4), nn::Linear(4, odd ? 5 : 6)),
         "parameter '1.weight' Float [6, 4]");
  nn::Sequential longer(nn::Linear(3, 4));
  if (odd) longer->push_back(nn::BatchNorm1d(4));
  expect(longer, "parameter '1.weight'");
  nn::Sequential typed(nn::Linear(3, 4));
  if (odd) make_double(*typed);
  expect(typed, "'0.weight' Double");
  nn::Sequential frozen(nn::Linear(3, 4));
  frozen->ptr(0)->as<nn::Linear>()->bias.set_requires_grad(!odd);
  expect(frozen, "parameter '0.bias'");
  nn::Sequential buffered(nn::BatchNorm1d(nn::BatchNorm1dOptions(4).track_running_stats(!odd)));
  expect(buffered, "buffer '0.running_mean'");
  const auto message = refusal(world, nn::Sequential(nn::Linear(3, 4)),
                               over(world).bucket_cap_bytes(odd ? 100 : 200));
  EXPECT_NE(message.find("bucket_cap_bytes 200"), std::string::npos) << message;
}

TEST(DistributedDataParallel, LoadingIntoAWrappedModuleIsReducedOrRefused) {
  const auto world = new_world();
  auto net = linear_net();
  DistributedDataParallel<nn::Sequential> ddp(net, over(world));
  std::stringstream archive;
  torch::save(net, archive);
  torch::load(net, archive);
  try {
    ddp(torch::randn({2, 5}) + world->rank()).square().sum().backward();
  } catch (const c10::Error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("was replaced after the module was wrapped"), std::string::npos)
        << message;
    return;
  }
  for (const auto& item : net->named_parameters())
    EXPECT_TRUE(bit_equal_across(*world, item.value().grad())) << item.key();
}

TEST(DistributedDataParallel, ReplacedParameterDataIsAnErrorThatNamesIt) {
  const auto world = new_world();
  auto net = linear_net();
  DistributedDataParallel<nn::Sequential> ddp(net, over(world));
  net->to(torch::kDouble);
  const auto message = message_of<c10::Error>([&] { ddp(torch::randn({2, 5}, torch::kDouble)); });
  EXPECT_NE(message.find("'0.weight'"), std::string::npos) << message;
}

TEST(DistributedDataParallel, RefusesBadArgumentsBeforeCommunicating) {
  const auto comm = self_communicator();
  EXPECT_THROW(DistributedDataParallel<nn::Sequential>(nn::Sequential(nullptr), over(comm)),
               c10::Error);
  EXPECT_THROW(
      DistributedDataParallel<nn::Sequential>(linear_net(), over(comm).bucket_cap_bytes(0)),
      c10::Error);
  nn::Sequential sparse(nn::Embedding(nn::EmbeddingOptions(10, 3).sparse(true)));
  const auto message =
      message_of<c10::Error>([&] { DistributedDataParallel<nn::Sequential>(sparse, over(comm)); });
  EXPECT_NE(message.find("'0' makes sparse gradients"), std::string::npos) << message;
}

}  // namespace
}  // namespace syncnorm
