// The handed cases: as given, where the job has at least the case's ranks, and with the same batch
// cut anew over however many ranks there are, since only the gathered batch matters.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "support/batch.h"
#include "support/world.h"
#include "syncnorm/sync_batch_norm.h"

namespace syncnorm {
namespace {

using nlohmann::json;
using testing::bit_equal_across;
using testing::new_world;
using testing::relative_difference;

// The cases come from one process in double; both sides round some hundred times, at magnitudes up
// to 1e3 times the result's.
constexpr double kTolerance = 1e-10;
// Buffers are a blend of two doubles: a few units in the last place.
constexpr double kBufferTolerance = 1e-15;

torch::Tensor tensor_of(const json& value) {
  if (value.is_null()) return {};
  const auto shape = value["shape"].get<std::vector<int64_t>>();
  const auto data = value["data"].get<std::vector<double>>();
  return torch::tensor(data, torch::kDouble).view(shape);
}

torch::Tensor gather_ranks(const json& test, const char* field) {
  std::vector<torch::Tensor> parts;
  for (const auto& rank : test["ranks"]) parts.push_back(tensor_of(rank[field]));
  return torch::cat(parts);
}

torch::Tensor sum_ranks(const json& test, const char* field) {
  torch::Tensor sum;
  for (const auto& rank : test["ranks"])
    if (!rank[field].is_null())
      sum = sum.defined() ? sum + tensor_of(rank[field]) : tensor_of(rank[field]);
  return sum;
}

SyncBatchNorm module_of(const json& test, const std::shared_ptr<Communicator>& comm) {
  const auto& given = test["options"];
  auto options = SyncBatchNormOptions(given["num_features"].get<int64_t>())
                     .eps(given["eps"].get<double>())
                     .affine(given["affine"].get<bool>())
                     .track_running_stats(given["track_running_stats"].get<bool>())
                     .communicator(comm)
                     .name(test["name"].get<std::string>());
  options.momentum(given["momentum"].is_null()
                       ? std::nullopt
                       : std::optional<double>(given["momentum"].get<double>()));
  SyncBatchNorm module(options);
  module->to(torch::kDouble);
  module->train(test["training"].get<bool>());
  const torch::NoGradGuard no_grad;
  if (module->weight.defined()) module->weight.copy_(tensor_of(test["weight"]));
  if (module->bias.defined()) module->bias.copy_(tensor_of(test["bias"]));
  if (module->running_mean.defined()) {
    module->running_mean.copy_(tensor_of(test["running_mean_before"]));
    module->running_var.copy_(tensor_of(test["running_var_before"]));
    module->num_batches_tracked.fill_(test["num_batches_tracked_before"].get<int64_t>());
  }
  return module;
}

struct Shard {
  torch::Tensor x, dy, y, dx, dweight,
      dbias;  // the sums undefined where only their total over ranks is known
};

void check(const json& test, const Shard& expected, const std::shared_ptr<Communicator>& comm) {
  auto module = module_of(test, comm);
  auto x = expected.x.clone().set_requires_grad(true);
  const bool communicates = test["training"].get<bool>() || !module->running_mean.defined();
  comm->reset_counters();
  const auto y = module->forward(x);
  EXPECT_EQ(comm->counters().collectives(),
            communicates ? 1 + comm->counters().second_exchanges : 0);
  comm->reset_counters();
  y.backward(expected.dy);
  EXPECT_EQ(comm->counters().collectives(), communicates ? 1 : 0);

  EXPECT_LT(relative_difference(y, expected.y), kTolerance);
  EXPECT_LT(relative_difference(x.grad(), expected.dx), kTolerance);
  if (module->weight.defined()) {
    auto dweight = module->weight.grad().clone();
    auto dbias = module->bias.grad().clone();
    if (!expected.dweight.defined()) {
      comm->all_reduce(dweight);
      comm->all_reduce(dbias);
    }
    EXPECT_LT(
        relative_difference(dweight, expected.dweight.defined() ? expected.dweight
                                                                : sum_ranks(test, "dweight_local")),
        kTolerance);
    EXPECT_LT(relative_difference(dbias, expected.dbias.defined() ? expected.dbias
                                                                  : sum_ranks(test, "dbias_local")),
              kTolerance);
  }
  if (module->running_mean.defined()) {
    EXPECT_LT(relative_difference(module->running_mean, tensor_of(test["running_mean_after"])),
              kBufferTolerance);
    EXPECT_LT(relative_difference(module->running_var, tensor_of(test["running_var_after"])),
              kBufferTolerance);
    EXPECT_EQ(
        module->num_batches_tracked.item<int64_t>(),
        test["num_batches_tracked_before"].get<int64_t>() + (test["training"].get<bool>() ? 1 : 0));
    EXPECT_TRUE(bit_equal_across(*comm, module->running_mean));
    EXPECT_TRUE(bit_equal_across(*comm, module->running_var));
  }
}

const json& all_cases() {
  static const json cases = json::parse(std::ifstream(SYNCNORM_TEST_DATA "/sync_batch_norm.json"));
  return cases;
}

TEST(SyncBatchNormCases, AsGiven) {
  const auto world = new_world();
  for (const auto& test : all_cases()) {
    SCOPED_TRACE(test["name"].get<std::string>());
    const int ranks = static_cast<int>(test["ranks"].size());
    if (world->size() < ranks) continue;
    const auto comm = world->split(world->rank() < ranks ? 0 : -1, world->rank());
    if (comm == nullptr) {
      module_of(test, nullptr);  // unnamed modules are numbered as they are made: keep in step
      continue;
    }
    const auto& mine = test["ranks"][comm->rank()];
    check(test,
          {tensor_of(mine["x"]), tensor_of(mine["dy"]), tensor_of(mine["y"]), tensor_of(mine["dx"]),
           tensor_of(mine["dweight_local"]), tensor_of(mine["dbias_local"])},
          comm);
  }
}

TEST(SyncBatchNormCases, CutAnewOverAllRanks) {
  const auto world = new_world();
  std::mt19937 generator(7);
  for (const auto& test : all_cases()) {
    SCOPED_TRACE(test["name"].get<std::string>());
    const auto x = gather_ranks(test, "x");
    const auto sizes = testing::random_shards(x.size(0), world->size(), generator);
    const auto mine = [&](const char* field) {
      return testing::shard_of(gather_ranks(test, field), sizes, world->rank());
    };
    check(test, {mine("x"), mine("dy"), mine("y"), mine("dx"), {}, {}}, world);
  }
}

}  // namespace
}  // namespace syncnorm
