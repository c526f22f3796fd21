// Differentiable collectives against the same computation on whole tensors of one process, in
// double: values, gradients, gradients of gradients, and what travels.
#include "syncnorm/collectives.h"

#include <gtest/gtest.h>

#include <functional>

#include "support/batch.h"
#include "support/world.h"

namespace syncnorm {
namespace {

using testing::message_of;
using testing::new_world;
using testing::relative_difference;
using torch::Tensor;

// Sums of at most a hundred products of order one, in another order: some units of 2^-53 each.
constexpr double kTolerance = 1e-13;

using Comm = std::shared_ptr<Communicator>;
using Sizes = std::vector<int64_t>;

struct Setting {
  Comm comm;
  Sizes sizes;
  Tensor weights;  // [ranks, H], by which each rank's own work differs
};

/// How `mine` lies in the whole input of the reference.
enum class Layout { replicated, columns, own };

struct Case {
  const char* name;
  Layout layout;
  std::function<Tensor(const Tensor& mine, const Setting&)> loss;  // the same on all ranks
  std::function<Tensor(const Tensor& whole, const Setting&)> reference;
  Sizes forward;  // all_reduce, all_gather, reduce_scatter, without the one that sums the loss
  Sizes backward;
};

Tensor work(const Tensor& x, const Tensor& weight) { return (x * weight).pow(3).sum(); }

Tensor own_columns(const Tensor& x, const Setting& s, int rank) {
  int64_t start = 0;
  for (int r = 0; r < rank; ++r) start += s.sizes[r];
  return x.narrow(-1, start, s.sizes[rank]);
}

Tensor total(const Tensor& loss, const Setting& s) {
  return reduce_from_ranks(loss, s.comm, "loss");
}

Tensor every_rank(const Setting& s, const std::function<Tensor(int)>& loss) {
  Tensor sum = loss(0);
  for (int r = 1; r < s.comm->size(); ++r) sum = sum + loss(r);
  return sum;
}

std::vector<Case> cases() {
  const auto apart = [](const Tensor& x, const Setting& s) {
    return every_rank(s, [&](int r) { return work(x, s.weights[r]); });
  };
  const auto alike = [](const Tensor& x, const Setting& s) { return work(x, s.weights[0]); };
  const auto weight_of = [](const Setting& s) { return s.weights[s.comm->rank()]; };
  return {
      {"copy_to_ranks",
       Layout::replicated,
       [=](const Tensor& x, const Setting& s) {
         return total(work(copy_to_ranks(x, s.comm, "m"), weight_of(s)), s);
       },
       apart,
       {0, 0, 0},
       {1, 0, 0}},
      {"reduce_from_ranks",
       Layout::own,
       [=](const Tensor& x, const Setting& s) {
         return work(reduce_from_ranks(x, s.comm, "m"), s.weights[0]);
       },
       [](const Tensor& x, const Setting& s) { return work(x.sum(0), s.weights[0]); },
       {1, 0, 0},
       {0, 0, 0}},
      {"gather_columns",
       Layout::columns,
       [=](const Tensor& x, const Setting& s) {
         return total(work(gather_columns(x, s.sizes, s.comm, "m"), weight_of(s)), s);
       },
       apart,
       {0, 1, 0},
       {0, 0, 1}},
      {"scatter_sum_columns",
       Layout::own,
       [=](const Tensor& x, const Setting& s) {
         const auto y = scatter_sum_columns(x, s.sizes, s.comm, "m");
         return total(work(y, own_columns(s.weights[0], s, s.comm->rank())), s);
       },
       [](const Tensor& x, const Setting& s) { return work(x.sum(0), s.weights[0]); },
       {0, 0, 1},
       {0, 1, 0}},
      {"take_columns",
       Layout::replicated,
       [=](const Tensor& x, const Setting& s) {
         const auto y = take_columns(x, s.sizes, s.comm, "m");
         return total(work(y, own_columns(s.weights[0], s, s.comm->rank())), s);
       },
       alike,
       {0, 0, 0},
       {0, 1, 0}},
      {"gather_replicated_columns",
       Layout::columns,
       [=](const Tensor& x, const Setting& s) {
         return work(gather_replicated_columns(x, s.sizes, s.comm, "m"), s.weights[0]);
       },
       alike,
       {0, 1, 0},
       {0, 0, 0}},
  };
}

Tensor part_of(const Tensor& whole, Layout layout, const Setting& s) {
  if (layout == Layout::own) return whole[s.comm->rank()];
  return layout == Layout::columns ? own_columns(whole, s, s.comm->rank()) : whole;
}

/// A leaf with the strides of a permuted tensor.
Tensor strided_leaf(const Tensor& x) {
  return x.movedim(-1, 0)
      .contiguous()
      .movedim(0, -1)
      .detach()
      .clone(at::MemoryFormat::Preserve)
      .set_requires_grad(true);
}

Sizes moved(const Comm& comm) {
  const auto& c = comm->counters();
  return {c.all_reduce, c.all_gather, c.reduce_scatter};
}

void expect_moved(const Comm& comm, Sizes expected, bool sums_loss, const std::string& what) {
  expected[0] += sums_loss ? 1 : 0;
  EXPECT_EQ(moved(comm), expected) << what;
  comm->reset_counters();
}

Tensor derivative(const Tensor& y, const Tensor& x, bool create_graph) {
  return torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, create_graph)[0];
}

void compare(const Case& c, const Sizes& leading, const Setting& s) {
  const auto what = c10::str(c.name, " ", leading, " x ", s.sizes);
  auto shape = leading;
  shape.push_back(s.weights.size(1));
  if (c.layout == Layout::own) shape.insert(shape.begin(), s.comm->size());
  auto whole = torch::randn(shape, torch::kDouble).set_requires_grad(true);
  const auto expected = c.reference(whole, s);
  const auto expected_grad = derivative(expected, whole, true);
  const auto expected_second = derivative(expected_grad.pow(2).sum(), whole, false);

  auto mine = strided_leaf(part_of(whole, c.layout, s));
  s.comm->reset_counters();
  const auto loss = c.loss(mine, s);
  const bool sums_loss = std::string(c.name) != "reduce_from_ranks" &&
                         std::string(c.name) != "gather_replicated_columns";
  expect_moved(s.comm, c.forward, sums_loss, what + " forward");
  EXPECT_LE(relative_difference(loss, expected), kTolerance) << what;

  const auto plain = derivative(loss, mine, false);
  expect_moved(s.comm, c.backward, false, what + " backward");
  const auto grad = derivative(loss, mine, true);
  EXPECT_TRUE(torch::equal(plain, grad)) << what;
  EXPECT_LE(relative_difference(grad, part_of(expected_grad, c.layout, s)), kTolerance) << what;

  auto square = grad.pow(2).sum();
  if (c.layout != Layout::replicated) square = total(square, s);
  EXPECT_LE(
      relative_difference(derivative(square, mine, false), part_of(expected_second, c.layout, s)),
      kTolerance)
      << what;
}

TEST(Collectives, EqualWholeTensorsInValueAndDerivatives) {
  const auto comm = new_world();
  std::mt19937 generator(1);
  torch::manual_seed(1);
  for (const int64_t columns : {1, 3, 8}) {
    for (const auto& leading : std::vector<Sizes>{{}, {5}, {0}, {2, 3}, {2, 1, 2}}) {
      Setting s;
      s.comm = comm;
      s.sizes = testing::random_shards(columns, comm->size(), generator);
      s.weights = torch::randn({comm->size(), columns}, torch::kDouble);
      for (const auto& c : cases()) compare(c, leading, s);
    }
  }
}

TEST(Collectives, MoveTheirOwnDtypeAndEachValueOnce) {
  const auto comm = new_world();
  const auto sizes = balanced_shards(7, comm->size());
  const int64_t own = sizes[comm->rank()];
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble}) {
    const auto width = static_cast<int64_t>(c10::elementSize(dtype));
    const auto bytes = [&] {
      const auto moved = comm->counters().bytes;
      comm->reset_counters();
      return moved;
    };
    // Small whole numbers: sums are exact in every dtype.
    const auto whole = (torch::arange(21) % 5).view({3, 7}).to(dtype);
    auto shard =
        whole
            .narrow(1,
                    comm->rank() == 0
                        ? 0
                        : std::accumulate(sizes.begin(), sizes.begin() + comm->rank(), int64_t{0}),
                    own)
            .detach()
            .clone()
            .set_requires_grad(true);
    comm->reset_counters();
    const auto gathered = gather_columns(shard, sizes, comm, "m");
    EXPECT_EQ(bytes(), 3 * own * width);
    EXPECT_TRUE(torch::equal(gathered, whole));
    gathered.backward(whole);
    EXPECT_EQ(bytes(), 21 * width);
    EXPECT_EQ(shard.grad().scalar_type(), dtype);
    EXPECT_TRUE(torch::equal(shard.grad(), shard.detach() * comm->size()));
    const auto summed = reduce_from_ranks(whole, comm, "m");
    EXPECT_EQ(bytes(), 21 * width);
    EXPECT_TRUE(torch::equal(summed, whole * comm->size()));
  }
}

TEST(Collectives, ResultsAreNeitherViewsNorTheInput) {
  const auto comm = new_world();
  auto x = torch::ones({1, comm->size()}, torch::kDouble).set_requires_grad(true);
  const Sizes sizes = testing::ones(comm->size());
  take_columns(x, sizes, comm, "m").mul_(2);
  reduce_from_ranks(x, comm, "m").mul_(2);
  scatter_sum_columns(x, sizes, comm, "m").mul_(2);
  gather_columns(x.narrow(1, 0, 1), sizes, comm, "m").mul_(2).sum().backward();
  EXPECT_TRUE(torch::equal(x.detach(), torch::ones_like(x)));
  EXPECT_EQ(x.grad()[0][0].item<double>(), 2.0 * comm->size());
}

/// Rank r holds positions r and r + 1: neighbours share one. Of more than two ranks, rank 1 holds
/// nothing and rank 0 its positions as well.
Sharding overlapping(const Comm& comm) {
  Sharding sharding;
  sharding.comm = comm;
  sharding.extent = comm->size() + 1;
  for (int r = 0; r < comm->size(); ++r) sharding.ranges.push_back({{r, 1}, {r + 1, 1}});
  if (comm->size() > 2) {
    sharding.ranges[1].clear();
    sharding.ranges[0].push_back({2, 1});
  }
  return sharding;
}

TEST(Collectives, SharedPositionsSumTheirGradients) {
  const auto comm = new_world();
  auto sharding = overlapping(comm);
  torch::manual_seed(2);
  for (const int64_t dim : {0, 1}) {
    sharding.dim = dim;
    auto whole = torch::randn({sharding.extent, 3}, torch::kDouble);
    if (dim == 1) whole = whole.t();
    whole.set_requires_grad(true);
    const auto factors = torch::randn({comm->size()}, torch::kDouble);
    const auto loss_of = [&](const Tensor& shard, int rank) {
      return (shard * factors[rank]).pow(3).sum();
    };
    Tensor expected;
    for (int r = 0; r < comm->size(); ++r) {
      std::vector<Tensor> parts;
      for (const auto& range : sharding.ranges[r])
        parts.push_back(whole.narrow(dim, range.offset, range.size));
      if (parts.empty()) continue;
      const auto loss = loss_of(torch::cat(parts, dim), r);
      expected = expected.defined() ? expected + loss : loss;
    }
    const auto gradient = derivative(expected, whole, false);

    auto shard = sharding.shard_of(whole.detach()).set_requires_grad(true);
    comm->reset_counters();
    loss_of(sum_shared_gradient(shard, sharding, "m"), comm->rank()).backward();
    EXPECT_LE(relative_difference(shard.grad(), sharding.shard_of(gradient)), kTolerance);
    int64_t shared = 0;
    for (const auto& range : sharding.shared_ranges()) shared += range.size;
    EXPECT_EQ(moved(comm), (Sizes{shared > 0 ? 1 : 0, 0, 0}));
    EXPECT_EQ(comm->counters().bytes, shared * 3 * 8);
  }
}

TEST(Collectives, GradientsOfReplicatedParametersAreSummed) {
  const auto comm = new_world();
  auto parameter = torch::ones({2}, torch::kDouble).set_requires_grad(true);
  const double factor = comm->rank() + 1;
  (sum_gradient(parameter, comm, "m") * factor).sum().backward();
  const double expected = comm->size() * (comm->size() + 1) / 2.0;
  EXPECT_TRUE(torch::equal(parameter.grad(), torch::full({2}, expected, torch::kDouble)));
}

TEST(Collectives, WrongShapesAreErrorsBeforeCommunication) {
  const auto comm = new_world();
  const Sizes sizes = testing::ones(comm->size());
  const auto wide = torch::ones({2, comm->size() + 1});
  comm->reset_counters();
  for (const auto& text : {
           message_of<c10::Error>([&] { gather_columns(wide, sizes, comm, "block.qkv"); }),
           message_of<c10::Error>([&] { scatter_sum_columns(wide, sizes, comm, "block.qkv"); }),
           message_of<c10::Error>([&] { take_columns(wide, sizes, comm, "block.qkv"); }),
           message_of<c10::Error>([&] { take_columns(torch::ones({}), sizes, comm, "block.qkv"); }),
           message_of<c10::Error>([&] { gather_columns(wide, {}, comm, "block.qkv"); }),
           message_of<c10::Error>([&] { copy_to_ranks(Tensor(), comm, "block.qkv"); }),
       }) {
    EXPECT_NE(text.find("block.qkv"), std::string::npos) << text;
  }
  EXPECT_EQ(comm->counters().collectives(), 0);
}

/// A group of one that notes on whose behalf it works.
class Recorder final : public Communicator {
 public:
  Recorder() : Communicator(0, 1, "recorder") {}
  std::vector<std::string> modules;

 private:
  void note() { modules.push_back(operation().module); }
  void do_all_reduce(const Tensor&, ReduceOp) override { note(); }
  Tensor do_all_gather(const Tensor& shard, at::IntArrayRef) override {
    note();
    return shard.clone();
  }
  Tensor do_reduce_scatter(const Tensor& tensor, at::IntArrayRef) override {
    note();
    return tensor.clone();
  }
  void do_broadcast(const Tensor&, int) override { note(); }
  void do_barrier() override { note(); }
  Comm do_split(int, int) override { return nullptr; }
};

TEST(Collectives, NameTheirModuleInForwardAndBackward) {
  const auto comm = std::make_shared<Recorder>();
  auto x = torch::ones({2, 3}).set_requires_grad(true);
  gather_columns(copy_to_ranks(x, comm, "first"), {3}, comm, "second").sum().backward();
  EXPECT_EQ(comm->modules, (std::vector<std::string>{"second", "second", "first"}));
}

}  // namespace
}  // namespace syncnorm
