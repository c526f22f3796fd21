#include "syncnorm/convert.h"

#include "support/world.h"
#include "syncnorm/sync_batch_norm.h"

namespace syncnorm {
namespace {

namespace nn = torch::nn;
using testing::message_of;
using testing::new_world;
using torch::Tensor;

template <typename Impl>
std::vector<std::string> paths_of(const nn::Module& module) {
  std::vector<std::string> paths;
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    if (item.value()->as<Impl>() != nullptr) paths.push_back(item.key());
  }
  return paths;
}

std::vector<const c10::TensorImpl*> identities(const nn::Module& module) {
  std::vector<const c10::TensorImpl*> result;
  for (const auto& item : module.named_parameters())
    result.push_back(item.value().unsafeGetTensorImpl());
  for (const auto& item : module.named_buffers())
    result.push_back(item.value().unsafeGetTensorImpl());
  return result;
}

std::vector<std::string> keys(const nn::Module& module) {
  auto result = module.named_parameters().keys();
  const auto buffers = module.named_buffers().keys();
  result.insert(result.end(), buffers.begin(), buffers.end());
  return result;
}

/// Calls its children through the registry and containers only, as convert wants it.
struct NetImpl : nn::Module {
  NetImpl() {
    stem = register_module("stem", nn::Sequential(nn::Conv2d(nn::Conv2dOptions(3, 4, 3).padding(1)),
                                                  nn::BatchNorm2d(4), nn::ReLU()));
    blocks = register_module("blocks", nn::ModuleList());
    for (int i = 0; i < 2; ++i) {
      blocks->push_back(
          nn::Sequential({{"norm", nn::BatchNorm2d(nn::BatchNorm2dOptions(4).eps(1e-3))},
                          {"conv", nn::Conv2d(nn::Conv2dOptions(4, 4, 1))}}));
    }
    blocks->push_back(nn::BatchNorm2d(nn::BatchNorm2dOptions(4).momentum(std::nullopt)));
    const std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>> entries{
        {"plain", std::make_shared<nn::BatchNorm1dImpl>(nn::BatchNorm1dOptions(4).affine(false))},
        {"deep",
         nn::Sequential(nn::BatchNorm1d(nn::BatchNorm1dOptions(4).track_running_stats(false)))
             .ptr()}};
    heads = register_module("heads", nn::ModuleDict(entries));
  }

  Tensor forward(Tensor x) {
    x = stem->forward(x);
    for (int i = 0; i < 2; ++i) x = blocks[i]->as<nn::Sequential>()->forward(x);
    x = call(*blocks[2], x).mean({2, 3});
    return call(*heads["plain"], x) + heads["deep"]->as<nn::Sequential>()->forward(x);
  }

  static Tensor call(nn::Module& norm, const Tensor& x) {
    if (auto* sync = norm.as<SyncBatchNorm>()) return sync->forward(x);
    if (auto* two = norm.as<nn::BatchNorm2d>()) return two->forward(x);
    return norm.as<nn::BatchNorm1d>()->forward(x);
  }

  nn::Sequential stem{nullptr};
  nn::ModuleList blocks{nullptr};
  nn::ModuleDict heads{nullptr};
};
TORCH_MODULE(Net);

TEST(Convert, ReachesEveryContainerAndKeepsTensorsNamesAndOptions) {
  torch::manual_seed(1);
  Net net;
  const auto before = identities(*net);
  const auto names = keys(*net);
  const auto root = convert_sync_batchnorm(net.ptr(), self_communicator());
  EXPECT_EQ(root, net.ptr());
  const std::vector<std::string> expected{"stem.1",   "blocks.0.norm", "blocks.1.norm",
                                          "blocks.2", "heads.plain",   "heads.deep.0"};
  EXPECT_EQ(paths_of<SyncBatchNormImpl>(*net), expected);
  EXPECT_TRUE(paths_of<nn::BatchNorm2dImpl>(*net).empty());
  EXPECT_EQ(identities(*net), before) << "an optimizer would go on updating the old tensors";
  EXPECT_EQ(keys(*net), names);
  const auto* block = net->blocks[0]->as<nn::Sequential>()->ptr(0)->as<SyncBatchNorm>();
  EXPECT_EQ(block->options.eps(), 1e-3);
  EXPECT_EQ(block->options.name(), "blocks.0.norm");
  EXPECT_EQ(block->weight.unsafeGetTensorImpl(),
            block->named_parameters()["weight"].unsafeGetTensorImpl());
  EXPECT_EQ(block->running_var.unsafeGetTensorImpl(),
            block->named_buffers()["running_var"].unsafeGetTensorImpl());
  EXPECT_EQ(net->blocks[2]->as<SyncBatchNorm>()->options.momentum(), std::nullopt);
  EXPECT_FALSE(net->heads["plain"]->as<SyncBatchNorm>()->weight.defined());
  EXPECT_FALSE(net->heads["deep"]
                   ->as<nn::Sequential>()
                   ->ptr(0)
                   ->as<SyncBatchNorm>()
                   ->running_mean.defined());
}

TEST(Convert, ConvertedNetworkComputesTheSame) {
  torch::manual_seed(2);
  Net net;
  net->to(torch::kDouble);
  const auto copy = std::make_shared<NetImpl>();
  copy->to(torch::kDouble);
  const auto from = net->named_parameters();
  {
    const torch::NoGradGuard no_grad;
    for (auto& item : copy->named_parameters()) item.value().copy_(from[item.key()]);
  }
  convert_sync_batchnorm(net.ptr(), self_communicator());
  for (const bool training : {true, true, false}) {
    net->train(training);
    copy->train(training);
    const auto x = torch::randn({5, 3, 4, 4}, torch::kDouble);
    const auto got = net->forward(x);
    const auto wanted = copy->forward(x);
    EXPECT_LT(testing::relative_difference(got, wanted), 1e-12);
    net->zero_grad();
    copy->zero_grad();
    got.square().sum().backward();
    wanted.square().sum().backward();
    const auto theirs = copy->named_parameters();
    for (const auto& item : net->named_parameters()) {
      EXPECT_LT(testing::relative_difference(item.value().grad(), theirs[item.key()].grad()), 1e-9)
          << item.key();
    }
  }
  const auto buffers = copy->named_buffers();
  for (const auto& item : net->named_buffers()) {
    EXPECT_LT(testing::relative_difference(item.value(), buffers[item.key()]), 1e-12) << item.key();
  }
}

TEST(Convert, TakesStatisticsOverAllRanks) {
  const auto world = new_world();
  nn::Sequential net(nn::BatchNorm2d(2));
  convert_sync_batchnorm(net.ptr(), world);
  const auto x = torch::full({3, 2, 2, 2}, static_cast<double>(world->rank()), torch::kFloat);
  if (world->size() > 1) {
    const auto y = net->forward(x);
    const double mean = (world->size() - 1) / 2.0;
    EXPECT_TRUE((y == y[0][0][0][0]).all().item<bool>());
    EXPECT_EQ(y[0][0][0][0].item<float>() < 0, world->rank() < mean);
  }
  EXPECT_EQ(world->counters().all_reduce, world->size() > 1 ? 1 : 0);
}

TEST(Convert, KeepsDtypeFrozenPartsAndEvaluation) {
  for (const auto dtype : {torch::kHalf, torch::kDouble, torch::kBFloat16}) {
    nn::Sequential net(nn::BatchNorm2d(3), nn::BatchNorm2d(3));
    net->to(dtype);
    net->eval();
    net->ptr(1)->train();
    net->ptr(0)->as<nn::BatchNorm2d>()->weight.set_requires_grad(false);
    const auto before = identities(*net);
    convert_sync_batchnorm(net.ptr(), self_communicator());
    EXPECT_EQ(identities(*net), before);
    const auto* first = net->ptr(0)->as<SyncBatchNorm>();
    EXPECT_EQ(first->weight.scalar_type(), dtype);
    EXPECT_EQ(first->running_mean.scalar_type(), dtype);
    EXPECT_FALSE(first->weight.requires_grad());
    EXPECT_TRUE(first->bias.requires_grad());
    EXPECT_FALSE(first->is_training());
    EXPECT_TRUE(net->ptr(1)->is_training());
  }
}

struct TwicePresentImpl : nn::Module {
  TwicePresentImpl() {
    left = register_module("left", nn::Sequential());
    right = register_module("right", nn::Sequential());
    const auto shared = std::make_shared<nn::BatchNorm2dImpl>(3);
    left->push_back(shared);
    left->push_back(shared);
    right->push_back("again", shared);
    register_module("direct", shared);
  }
  nn::Sequential left{nullptr}, right{nullptr};
};

TEST(Convert, SharedModulesStayShared) {
  const auto net = std::make_shared<TwicePresentImpl>();
  convert_sync_batchnorm(net, self_communicator());
  const auto* one = net->left->ptr(0).get();
  ASSERT_NE(one->as<SyncBatchNorm>(), nullptr);
  EXPECT_EQ(net->left->ptr(1).get(), one);
  EXPECT_EQ(net->right->ptr(0).get(), one);
  EXPECT_EQ(net->named_children()["direct"].get(), one);
  EXPECT_EQ(net->left->named_children()["1"].get(), one);
  revert_sync_batchnorm(net);
  EXPECT_NE(net->left->ptr(0)->as<nn::BatchNorm2d>(), nullptr);
  EXPECT_EQ(net->left->ptr(0), net->named_children()["direct"]);
}

struct TypedMemberImpl : nn::Module {
  TypedMemberImpl() : norm(register_module("norm", nn::BatchNorm2d(3))) {
    other = register_module("other", nn::Sequential(nn::BatchNorm2d(3)));
  }
  nn::BatchNorm2d norm;
  nn::Sequential other{nullptr};
};

struct OuterImpl : nn::Module {
  OuterImpl() { register_module("first", nn::Sequential(nn::BatchNorm2d(3))); }
};

TEST(Convert, TypedMemberIsAnErrorThatChangesNothing) {
  const auto outer = std::make_shared<OuterImpl>();
  outer->register_module("inner", std::make_shared<TypedMemberImpl>());
  const auto before = identities(*outer);
  const auto message =
      message_of<c10::Error>([&] { convert_sync_batchnorm(outer, self_communicator()); });
  EXPECT_NE(message.find("'inner.norm'"), std::string::npos) << message;
  EXPECT_NE(message.find("Declare the member as syncnorm::SyncBatchNorm"), std::string::npos)
      << message;
  EXPECT_TRUE(paths_of<SyncBatchNormImpl>(*outer).empty());
  EXPECT_EQ(identities(*outer), before);
}

TEST(Convert, OutsideHolderIsAnErrorUntilItLetsGo) {
  nn::BatchNorm2d held(3);
  nn::Sequential net(held);
  EXPECT_THROW(convert_sync_batchnorm(net.ptr(), self_communicator()), c10::Error);
  held = nullptr;
  convert_sync_batchnorm(net.ptr(), self_communicator());
  EXPECT_NE(net->ptr(0)->as<SyncBatchNorm>(), nullptr);
}

struct OwnNormImpl : nn::BatchNorm2dImpl {
  using nn::BatchNorm2dImpl::BatchNorm2dImpl;
};

TEST(Convert, DerivedClassIsAnError) {
  nn::Sequential net;
  net->push_back(nn::BatchNorm2d(3));
  net->register_module("own", std::make_shared<OwnNormImpl>(3));
  const auto message =
      message_of<c10::Error>([&] { convert_sync_batchnorm(net.ptr(), self_communicator()); });
  EXPECT_NE(message.find("'own'"), std::string::npos) << message;
  EXPECT_NE(net->ptr(0)->as<nn::BatchNorm2d>(), nullptr);
}

TEST(Convert, RootMayBeABatchNorm) {
  const auto norm = std::make_shared<nn::BatchNorm1dImpl>(3);
  const auto converted = convert_sync_batchnorm(norm, self_communicator());
  ASSERT_NE(converted->as<SyncBatchNorm>(), nullptr);
  EXPECT_EQ(converted->as<SyncBatchNorm>()->weight.unsafeGetTensorImpl(),
            norm->weight.unsafeGetTensorImpl());
  const auto reverted = revert_sync_batchnorm(converted);
  EXPECT_NE(reverted->as<nn::BatchNorm1d>(), nullptr);
  EXPECT_THROW(convert_sync_batchnorm(nullptr), c10::Error);
  EXPECT_THROW(revert_sync_batchnorm(nullptr), c10::Error);
}

TEST(Revert, IsTheInverse) {
  Net net;
  net->eval();
  const auto before = identities(*net);
  convert_sync_batchnorm(net.ptr(), self_communicator());
  revert_sync_batchnorm(net.ptr());
  EXPECT_EQ(identities(*net), before);
  EXPECT_TRUE(paths_of<SyncBatchNormImpl>(*net).empty());
  EXPECT_EQ(paths_of<nn::BatchNorm2dImpl>(*net).size(), 4u);
  EXPECT_EQ(paths_of<nn::BatchNorm1dImpl>(*net).size(), 2u);
  const auto* norm = net->blocks[0]->as<nn::Sequential>()->ptr(0)->as<nn::BatchNorm2d>();
  EXPECT_EQ(norm->options.eps(), 1e-3);
  EXPECT_FALSE(norm->is_training());
  EXPECT_EQ(net->blocks[2]->as<nn::BatchNorm2d>()->options.momentum(), std::nullopt);
  net->forward(torch::randn({2, 3, 4, 4}));
}

TEST(Revert, FitsTheInputsSeen) {
  nn::Sequential net;
  for (int i = 0; i < 4; ++i) {
    net->push_back(SyncBatchNorm(SyncBatchNormOptions(2).communicator(self_communicator())));
  }
  for (int dims = 1; dims <= 3; ++dims) {
    std::vector<int64_t> shape(static_cast<size_t>(dims) + 2, 2);
    net->ptr(dims)->as<SyncBatchNorm>()->forward(torch::randn(shape));
  }
  revert_sync_batchnorm(net.ptr());
  EXPECT_NE(net->ptr(0)->as<nn::BatchNorm2d>(), nullptr) << "2d where nothing is known";
  EXPECT_NE(net->ptr(1)->as<nn::BatchNorm1d>(), nullptr);
  EXPECT_NE(net->ptr(2)->as<nn::BatchNorm2d>(), nullptr);
  EXPECT_NE(net->ptr(3)->as<nn::BatchNorm3d>(), nullptr);
}

TEST(NameModules, GivesPathsToTheUnnamed) {
  nn::Sequential inner(SyncBatchNorm(2), SyncBatchNorm(SyncBatchNormOptions(2).name("mine")));
  nn::ModuleList net(inner);
  name_modules(*net);
  EXPECT_EQ(inner->ptr(0)->as<SyncBatchNorm>()->options.name(), "0.0");
  EXPECT_EQ(inner->ptr(1)->as<SyncBatchNorm>()->options.name(), "mine");
}

}  // namespace
}  // namespace syncnorm
