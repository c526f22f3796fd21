// The handed cases of row norms: as given, where the job has at least the case's ranks, and with
// the same rows cut anew over however many ranks there are, zero columns included.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "support/batch.h"
#include "support/columns.h"
#include "syncnorm/tensor_parallel_norm.h"

namespace syncnorm {
namespace {

using nlohmann::json;
using testing::columns_of;
using testing::new_world;
using testing::relative_difference;

// The cases come from one process in double; rows near 40000 lose 1e9 of double's 1e16 to their
// offset on the way to both results.
constexpr double kTolerance = 1e-10;

struct Values {
  torch::Tensor x, dy, weight, bias, y, dx, dweight, dbias;
};

/// The whole tensor, its shards side by side.
torch::Tensor whole(const json& shards) {
  if (shards.is_null()) return {};
  std::vector<torch::Tensor> parts;
  for (const auto& part : shards)
    parts.push_back(torch::tensor(part["data"].get<std::vector<double>>(), torch::kDouble)
                        .view(part["shape"].get<std::vector<int64_t>>()));
  return torch::cat(parts, -1);
}

Values values_of(const json& test, const std::vector<int64_t>& sizes, int rank) {
  const auto mine = [&](const char* field) { return columns_of(whole(test[field]), sizes, rank); };
  return {mine("x"), mine("dy"), mine("weight"),  mine("bias"),
          mine("y"), mine("dx"), mine("dweight"), mine("dbias")};
}

template <typename Norm>
void check_module(Norm norm, const Values& expected, const std::shared_ptr<Communicator>& comm) {
  norm->to(torch::kDouble);
  {
    const torch::NoGradGuard no_grad;
    if (expected.weight.defined()) norm->weight.copy_(expected.weight);
    if (expected.bias.defined()) norm->bias.copy_(expected.bias);
  }
  auto x = expected.x.clone().set_requires_grad(true);
  comm->reset_counters();
  const auto y = norm->forward(x);
  EXPECT_EQ(comm->counters().collectives(), 1 + comm->counters().second_exchanges);
  comm->reset_counters();
  y.backward(expected.dy);
  EXPECT_EQ(comm->counters().collectives(), 1);

  EXPECT_LT(relative_difference(y, expected.y), kTolerance);
  EXPECT_LT(relative_difference(x.grad(), expected.dx), kTolerance);
  if (expected.dweight.defined()) {
    EXPECT_LT(relative_difference(norm->weight.grad(), expected.dweight), kTolerance);
  }
  if (expected.dbias.defined()) {
    EXPECT_LT(relative_difference(norm->bias.grad(), expected.dbias), kTolerance);
  }
}

void check(const json& test, const std::vector<int64_t>& sizes,
           const std::shared_ptr<Communicator>& comm) {
  const auto expected = values_of(test, sizes, comm->rank());
  const auto hidden = test["hidden"].get<int64_t>();
  const auto name = test["name"].get<std::string>();
  if (test["kind"] == "layer_norm") {
    check_module(TensorParallelLayerNorm(TensorParallelLayerNormOptions(hidden)
                                             .eps(test["eps"].get<double>())
                                             .elementwise_affine(!test["weight"].is_null())
                                             .bias(!test["bias"].is_null())
                                             .shard_sizes(sizes)
                                             .communicator(comm)
                                             .name(name)),
                 expected, comm);
  } else {
    check_module(TensorParallelRMSNorm(TensorParallelRMSNormOptions(hidden)
                                           .eps(test["eps"].get<double>())
                                           .elementwise_affine(!test["weight"].is_null())
                                           .bias(!test["bias"].is_null())
                                           .unit_offset(test["unit_offset"].get<bool>())
                                           .shard_sizes(sizes)
                                           .communicator(comm)
                                           .name(name)),
                 expected, comm);
  }
}

const json& all_cases() {
  static const json cases = json::parse(std::ifstream(SYNCNORM_TEST_DATA "/row_norms.json"));
  return cases;
}

TEST(TensorParallelNormCases, AsGiven) {
  const auto world = new_world();
  for (const auto& test : all_cases()) {
    SCOPED_TRACE(test["name"].get<std::string>());
    const auto sizes = test["shard_sizes"].get<std::vector<int64_t>>();
    const int ranks = static_cast<int>(sizes.size());
    if (world->size() < ranks) continue;
    const auto comm = world->split(world->rank() < ranks ? 0 : -1, world->rank());
    if (comm != nullptr) check(test, sizes, comm);
  }
}

TEST(TensorParallelNormCases, CutAnewOverAllRanks) {
  const auto world = new_world();
  std::mt19937 generator(7);
  for (const auto& test : all_cases()) {
    SCOPED_TRACE(test["name"].get<std::string>());
    check(test, testing::random_shards(test["hidden"].get<int64_t>(), world->size(), generator),
          world);
  }
}

}  // namespace
}  // namespace syncnorm
