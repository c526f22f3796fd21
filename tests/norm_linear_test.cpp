// Norm and linear layer in one gather against the plain composition on whole rows.
#include "syncnorm/norm_linear.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include "support/batch.h"
#include "support/columns.h"

namespace syncnorm {
namespace {

using testing::columns_of;
using testing::message_of;
using testing::new_world;
using testing::relative_difference;

struct Trial {
  int64_t hidden = 24, out = 10;
  std::vector<int64_t> leading{5};
  std::vector<int64_t> shards;
  NormKind norm = NormKind::rms;
  bool affine = true, unit_offset = false, bias = true, keep = true;
  Residual residual = Residual::sharded;
  double offset = 0;
};

NormColumnParallelLinearOptions options_of(const Trial& trial,
                                           const std::shared_ptr<Communicator>& comm) {
  auto options = NormColumnParallelLinearOptions(trial.hidden, trial.out)
                     .norm(trial.norm)
                     .elementwise_affine(trial.affine)
                     .unit_offset(trial.unit_offset)
                     .bias(trial.bias)
                     .keep_gathered(trial.keep)
                     .residual(trial.residual)
                     .seed(17)
                     .communicator(comm)
                     .name("nl");
  if (trial.residual == Residual::sharded) options.in_shard_sizes(trial.shards);
  return options;
}

/// Whole parameters and input, and what plain operations make of them.
struct Whole {
  torch::Tensor x, gamma, beta, weight, bias, dy, y;

  explicit Whole(const Trial& trial) {
    torch::manual_seed(23);
    auto shape = trial.leading;
    shape.push_back(trial.hidden);
    const auto draw = [](std::vector<int64_t> sizes) {
      return torch::randn(sizes, torch::kDouble).set_requires_grad(true);
    };
    x = (torch::randn(shape, torch::kDouble) + trial.offset).set_requires_grad(true);
    if (trial.affine) gamma = draw({trial.hidden});
    if (trial.affine && trial.norm == NormKind::layer) beta = draw({trial.hidden});
    weight = draw({trial.out, trial.hidden});
    if (trial.bias) bias = draw({trial.out});
    shape.back() = trial.out;
    dy = torch::randn(shape, torch::kDouble);
    y = compose(trial);
  }

  torch::Tensor compose(const Trial& trial) const {
    const auto scale = gamma.defined() && trial.unit_offset ? gamma + 1 : gamma;
    const auto u = trial.norm == NormKind::layer
                       ? torch::layer_norm(x, {trial.hidden}, scale, beta, 1e-5)
                       : at::rms_norm(x, {trial.hidden},
                                      scale.defined() ? std::optional(scale) : std::nullopt, 1e-6);
    return torch::linear(u, weight, bias);
  }
};

/// The module with the whole's parameters, cut.
struct Module {
  Module(const Trial& trial, const Whole& whole, const std::shared_ptr<Communicator>& comm)
      : layer(options_of(trial, comm)) {
    layer->to(torch::kDouble);
    const torch::NoGradGuard no_grad;
    const auto cut = [&](const torch::Tensor& values) {
      return trial.residual == Residual::sharded ? columns_of(values, trial.shards, comm->rank())
                                                 : values;
    };
    if (trial.affine) gamma().copy_(cut(whole.gamma));
    if (beta().defined()) beta().copy_(cut(whole.beta));
    const auto rows = layer->linear->sharding_of("weight");
    layer->linear->weight.copy_(rows.shard_of(whole.weight));
    if (trial.bias) layer->linear->bias.copy_(rows.shard_of(whole.bias));
  }
  torch::Tensor gamma() {
    return layer->layer_norm.is_empty() ? layer->rms_norm->weight : layer->layer_norm->weight;
  }
  torch::Tensor beta() {
    return layer->layer_norm.is_empty() ? torch::Tensor() : layer->layer_norm->bias;
  }
  NormColumnParallelLinear layer;
};

// Sums of some hundred terms in double, in another order.
constexpr double kTolerance = 1e-12;

int64_t bytes_forward(const Trial& trial, int64_t rows, int64_t columns, int64_t element) {
  const bool layer = trial.norm == NormKind::layer;
  const int64_t parameters = layer && trial.affine ? 2 * columns : 0;
  return 8 * (1 + (layer ? 2 : 1) * rows) + element * (columns * rows + parameters);
}

void run(const Trial& trial, const std::shared_ptr<Communicator>& comm) {
  Whole whole(trial);
  whole.y.backward(whole.dy);
  Module module(trial, whole, comm);
  const bool sharded = trial.residual == Residual::sharded;
  const auto cut = [&](const torch::Tensor& values) {
    return sharded ? columns_of(values, trial.shards, comm->rank()) : values;
  };
  const auto out_sizes = balanced_shards(trial.out, comm->size());
  auto x = cut(whole.x.detach()).clone().set_requires_grad(true);
  comm->reset_counters();
  const auto y = module.layer(x);
  const auto& counters = comm->counters();
  const int64_t rows = whole.x.numel() / trial.hidden;
  EXPECT_EQ(counters.collectives(), sharded ? 1 : 0);
  EXPECT_EQ(counters.all_gather, sharded ? 1 : 0);
  if (sharded) {
    EXPECT_EQ(counters.bytes, bytes_forward(trial, rows, x.size(-1), 8));
  }
  comm->reset_counters();
  y.backward(columns_of(whole.dy, out_sizes, comm->rank()));
  EXPECT_EQ(counters.collectives(), sharded && !trial.keep ? 2 : 1);
  EXPECT_EQ(counters.reduce_scatter, sharded ? 1 : 0);
  if (sharded && trial.keep) {
    const int64_t words = trial.norm == NormKind::layer ? 2 : 1;
    EXPECT_EQ(counters.bytes, 8 * rows * (trial.hidden + words * comm->size()));
  }

  EXPECT_LT(relative_difference(y, columns_of(whole.y, out_sizes, comm->rank())), kTolerance);
  EXPECT_LT(relative_difference(x.grad(), cut(whole.x.grad())), kTolerance);
  const auto w_rows = module.layer->linear->sharding_of("weight");
  EXPECT_LT(relative_difference(module.layer->linear->weight.grad(),
                                w_rows.shard_of(whole.weight.grad())),
            kTolerance);
  if (trial.bias) {
    EXPECT_LT(
        relative_difference(module.layer->linear->bias.grad(), w_rows.shard_of(whole.bias.grad())),
        kTolerance);
  }
  if (trial.affine) {
    EXPECT_LT(relative_difference(module.gamma().grad(), cut(whole.gamma.grad())), kTolerance);
  }
  if (whole.beta.defined()) {
    EXPECT_LT(relative_difference(module.beta().grad(), cut(whole.beta.grad())), kTolerance);
  }
}

TEST(NormColumnParallelLinear, EqualsNormThenLinear) {
  const auto comm = new_world();
  std::mt19937 generator(3);
  int seen = 0;
  for (const auto norm : {NormKind::rms, NormKind::layer})
    for (const bool affine : {true, false})
      for (const bool keep : {true, false})
        for (const auto& leading : std::vector<std::vector<int64_t>>{{1}, {3, 4}, {7}, {0}, {}}) {
          Trial trial;
          trial.norm = norm;
          trial.affine = affine;
          trial.keep = keep;
          trial.bias = ++seen % 2 == 0;
          trial.unit_offset = norm == NormKind::rms && seen % 3 == 0;
          trial.leading = leading;
          trial.shards = testing::random_shards(trial.hidden, comm->size(), generator);
          SCOPED_TRACE(seen);
          run(trial, comm);
        }
}

TEST(NormColumnParallelLinear, FewFeaturesAndReplicatedInput) {
  const auto comm = new_world();
  for (const auto norm : {NormKind::rms, NormKind::layer}) {
    Trial trial;
    trial.norm = norm;
    trial.hidden = 3;
    trial.out = 2;
    trial.shards = balanced_shards(3, comm->size());
    run(trial, comm);
    trial.residual = Residual::replicated;
    run(trial, comm);
  }
}

TEST(NormColumnParallelLinear, LayerNormKeepsItsDigitsFarFromZero) {
  const auto comm = new_world();
  Trial trial;
  trial.norm = NormKind::layer;
  trial.offset = 1e6;
  trial.shards = balanced_shards(trial.hidden, comm->size());
  Whole whole(trial);
  Module module(trial, whole, comm);
  const auto x = columns_of(whole.x.detach(), trial.shards, comm->rank());
  // The input itself holds 1e6 to 1e-10; about zero, the variance would be known to 1e-4.
  EXPECT_LT(
      relative_difference(module.layer(x),
                          columns_of(whole.y, balanced_shards(10, comm->size()), comm->rank())),
      1e-8);
  EXPECT_EQ(comm->counters().collectives(), 1);
}

torch::Tensor error_of(const torch::Tensor& values, const torch::Tensor& exact) {
  return (values.to(torch::kDouble) - exact).square().sum();
}

// In half types the fused path rounds the columns once before the gather and the rows once after
// it, where the plain one rounds the rows once: the two errors are of one size.
TEST(NormColumnParallelLinear, InBFloat16AtMostHalfAgainAsFarOffAsThePlainComposition) {
  const auto comm = new_world();
  for (const auto norm : {NormKind::rms, NormKind::layer}) {
    Trial trial;
    trial.norm = norm;
    trial.hidden = 256;
    trial.out = 96;
    trial.leading = {64};
    trial.shards = balanced_shards(trial.hidden, comm->size());
    Whole whole(trial);
    const torch::NoGradGuard no_grad;
    for (auto* values :
         {&whole.x, &whole.gamma, &whole.beta, &whole.weight, &whole.bias, &whole.dy})
      if (values->defined()) *values = values->to(torch::kBFloat16).to(torch::kDouble);
    Whole exact = whole;
    const auto round = [](const torch::Tensor& values, bool grad) {
      return values.detach().clone().to(torch::kBFloat16).set_requires_grad(grad);
    };
    // The plain composition, a tensor-parallel layer done with separate operations: every rank's
    // part of the rows' gradient is rounded, then their sum.
    torch::Tensor plain_y, plain_dx;
    double errors[2][2] = {};
    {
      const at::AutoGradMode grad(true);
      exact.x = exact.x.detach().clone().set_requires_grad(true);
      exact.y = exact.compose(trial);
      exact.y.backward(exact.dy);
      Whole rounded = whole;
      auto x = round(whole.x, true);
      rounded.x = x;
      rounded.gamma = round(whole.gamma, false);
      if (rounded.beta.defined()) rounded.beta = round(whole.beta, false);
      rounded.weight = round(whole.weight, false);
      rounded.bias = round(whole.bias, false);
      plain_y = rounded.compose(trial);
      plain_y.backward(whole.dy.to(torch::kBFloat16));
      plain_dx = x.grad();

      Module module(trial, whole, comm);
      module.layer->to(torch::kBFloat16);
      auto mine = columns_of(x.detach(), trial.shards, comm->rank()).set_requires_grad(true);
      const auto y = module.layer(mine);
      const auto out_sizes = balanced_shards(trial.out, comm->size());
      y.backward(columns_of(whole.dy, out_sizes, comm->rank()).to(torch::kBFloat16));
      auto sums = torch::stack(
          {error_of(y, columns_of(exact.y.detach(), out_sizes, comm->rank())),
           error_of(mine.grad(), columns_of(exact.x.grad(), trial.shards, comm->rank()))});
      comm->all_reduce(sums);
      for (int i = 0; i < 2; ++i) errors[0][i] = sums[i].item<double>();
    }
    errors[1][0] = error_of(plain_y, exact.y.detach()).item<double>();
    errors[1][1] = error_of(plain_dx, exact.x.grad()).item<double>();
    EXPECT_LT(std::sqrt(errors[0][0]), 1.5 * std::sqrt(errors[1][0]));
    EXPECT_LT(std::sqrt(errors[0][1]), 1.5 * std::sqrt(errors[1][1]));
  }
}

TEST(NormColumnParallelLinear, FloatNormParametersKeepTheirDigitsBesideBFloat16Columns) {
  const auto comm = new_world();
  const int64_t hidden = 4 * comm->size();  // every rank's own mean is zero: nothing else rounds
  NormColumnParallelLinear layer(NormColumnParallelLinearOptions(hidden, hidden)
                                     .norm(NormKind::layer)
                                     .eps(0)
                                     .bias(false)
                                     .communicator(comm));
  layer->linear->to(torch::kBFloat16);
  {
    const torch::NoGradGuard no_grad;
    layer->linear->weight.copy_(layer->linear->sharding_of("weight").shard_of(torch::eye(hidden)));
    layer->layer_norm->weight.fill_(3 + 3.0 / 512);  // 3 in bfloat16
    layer->layer_norm->bias.fill_(-3);
  }
  const auto shards = balanced_shards(hidden, comm->size());
  const auto whole = torch::tensor({1, -1, -1, 1}, torch::kBFloat16).repeat({1, comm->size()});
  const auto y = layer(columns_of(whole, shards, comm->rank()));
  const auto expected = (whole.to(torch::kDouble) * (3 + 3.0 / 512) - 3).to(torch::kBFloat16);
  EXPECT_TRUE(torch::equal(y, columns_of(expected, shards, comm->rank()))) << y;
}

TEST(NormColumnParallelLinear, HalfColumnsBesideTheirRangesEnd) {
  const auto comm = new_world();
  NormColumnParallelLinear layer(
      NormColumnParallelLinearOptions(64, 8).bias(false).communicator(comm));
  layer->to(torch::kHalf);
  const torch::NoGradGuard no_grad;
  layer->rms_norm->weight.fill_(4);
  layer->linear->weight.fill_(1.0 / 64);
  const auto x = torch::full({2, layer->rms_norm->weight.size(0)}, 60000, torch::kHalf);
  // x * 4 would be infinite; the row's norm is 4 everywhere.
  const auto y = layer(x);
  EXPECT_LT(relative_difference(y, torch::full_like(y, 4)), 0x1p-9);
}

TEST(NormColumnParallelLinear, SecondDerivativesEqualThoseOfTheComposition) {
  const auto comm = new_world();
  for (const auto norm : {NormKind::rms, NormKind::layer}) {
    Trial trial;
    trial.norm = norm;
    trial.hidden = 7;
    trial.shards = balanced_shards(7, comm->size());
    Whole whole(trial);
    const auto penalty = [](const torch::autograd::variable_list& gradients) {
      return gradients[0].square().sum() + gradients[1].square().sum();
    };
    penalty(torch::autograd::grad({whole.y}, {whole.x, whole.weight}, {whole.dy}, true, true))
        .backward();
    Module module(trial, whole, comm);
    auto x = columns_of(whole.x.detach(), trial.shards, comm->rank()).set_requires_grad(true);
    const auto y = module.layer(x);
    const auto dy = columns_of(whole.dy, balanced_shards(trial.out, comm->size()), comm->rank());
    penalty(torch::autograd::grad({y}, {x, module.layer->linear->weight}, {dy}, true, true))
        .backward();
    EXPECT_LT(relative_difference(x.grad(), columns_of(whole.x.grad(), trial.shards, comm->rank())),
              1e-10);
    EXPECT_LT(relative_difference(
                  module.layer->linear->weight.grad(),
                  module.layer->linear->sharding_of("weight").shard_of(whole.weight.grad())),
              1e-10);
  }
}

TEST(NormColumnParallelLinear, DisagreementIsAnErrorOnEveryRank) {
  const auto world = new_world();
  if (world->size() < 2) GTEST_SKIP() << "needs two ranks";
  const auto fails = [&](const NormColumnParallelLinearOptions& options, const std::string& field) {
    auto mine = options;
    NormColumnParallelLinear layer(mine.communicator(new_world()).name("qkv"));
    const auto message = message_of<CommunicationError>([&] {
      layer(torch::randn({2, layer->linear->options.in_shard_sizes()[world->rank()]}));
    });
    EXPECT_NE(message.find(field + " differs"), std::string::npos) << message;
  };
  const bool odd = world->rank() == 1;
  fails(NormColumnParallelLinearOptions(8, 8).eps(odd ? 1e-3 : 1e-6), "eps");
  fails(NormColumnParallelLinearOptions(8, 8).keep_gathered(odd), "keep gathered");
  fails(NormColumnParallelLinearOptions(8, odd ? 10 : 8), "out features");
  // From three ranks on, no rank's blocks are too small for what it gets: only the tag can tell.
  auto shards = balanced_shards(12, world->size());
  if (world->rank() == world->size() - 1) {
    ++shards.front();
    --shards.back();
  }
  fails(NormColumnParallelLinearOptions(12, 8).in_shard_sizes(shards), "columns by rank");
  const at::AutoGradMode mode(!odd);  // the others' backward would wait for this rank
  fails(NormColumnParallelLinearOptions(8, 8), "backward");
}

TEST(NormColumnParallelLinear, UnderAutocastEqualsTheLayerInItsDtype) {
  const auto comm = new_world();
  torch::manual_seed(5);
  const auto shards = balanced_shards(12, comm->size());
  const auto whole = torch::randn({3, 12});
  for (const auto norm : {NormKind::rms, NormKind::layer})
    for (const bool keep : {true, false})
      for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
        NormColumnParallelLinear layer(NormColumnParallelLinearOptions(12, 10)
                                           .norm(norm)
                                           .keep_gathered(keep)
                                           .communicator(comm)
                                           .name("nl"));
        NormColumnParallelLinear cast(layer->options);
        cast->linear->to(torch::kBFloat16);
        auto x = columns_of(whole, shards, comm->rank()).to(dtype).set_requires_grad(true);
        auto x16 = x.detach().to(torch::kBFloat16).set_requires_grad(true);
        at::autocast::set_autocast_enabled(at::kCPU, true);
        at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
        const auto y = layer(x);
        at::autocast::set_autocast_enabled(at::kCPU, false);
        at::autocast::clear_cache();
        const auto expected = cast(x16);
        EXPECT_TRUE(torch::equal(y, expected));  // of one dtype, too
        y.sum().backward();
        expected.sum().backward();
        EXPECT_EQ(x.grad().scalar_type(), dtype);
        EXPECT_TRUE(torch::equal(x.grad(), x16.grad().to(dtype)));
        const auto parameters = cast->named_parameters();
        for (const auto& p : layer->named_parameters()) {
          EXPECT_EQ(p.value().grad().scalar_type(), torch::kFloat);
          EXPECT_TRUE(torch::equal(p.value().grad(), parameters[p.key()].grad().to(torch::kFloat)));
        }
      }
}

TEST(NormColumnParallelLinear, RefusesWhatDoesNotFit) {
  const auto comm = new_world();
  NormColumnParallelLinear layer(NormColumnParallelLinearOptions(8, 8).communicator(comm));
  const auto h = balanced_shards(8, comm->size())[comm->rank()];
  const auto says = [&](const std::string& expected, auto&& body) {
    const auto message = message_of<c10::Error>(body);
    EXPECT_NE(message.find(expected), std::string::npos) << message;
  };
  says("expects an input", [&] { layer(torch::randn({2, h + 1})); });
  says("convert one", [&] { layer(torch::randn({2, h}, torch::kDouble)); });
  says("unit_offset", [&] {
    NormColumnParallelLinear(NormColumnParallelLinearOptions(8, 8)
                                 .norm(NormKind::layer)
                                 .unit_offset(true)
                                 .communicator(comm));
  });
  EXPECT_EQ(comm->counters().collectives(), 0);
}

}  // namespace
}  // namespace syncnorm
