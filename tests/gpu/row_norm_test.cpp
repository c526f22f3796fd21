// Norms of split rows on the rank's GPU, statistics through the host, against torch's own in double
// on whole rows.
#include "gpu/gpu_test.h"
#include "support/residual_norm_trial.h"
#include "support/row_norm_trial.h"

namespace syncnorm {
namespace {

using testing::new_world;
using testing::row_norm::Norm;
using testing::row_norm::rows_of;
using testing::row_norm::run;

using GpuRowNorm = testing::OnGpu<>;

TEST_F(GpuRowNorm, EqualsTheNormOfTheWholeRows) {
  const auto comm = new_world();
  std::mt19937 generator(31);
  for (int i = 0; i < 80; ++i) {
    SCOPED_TRACE("trial " + std::to_string(i));
    auto trial = testing::row_norm::random_trial(generator, comm->size());
    trial.device = device;
    run(trial, comm, i);
  }
}

TEST_F(GpuRowNorm, FewAndManyRowsAndColumns) {
  const auto comm = new_world();
  for (const bool layer : {true, false})
    for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf})
      for (const auto& shape : std::vector<std::vector<int64_t>>{
               {70000, 5}, {0, 12}, {3, 0, 12}, {4, 4097}, {2, 70001}, {2048, 1024}, {1, 8192}}) {
        SCOPED_TRACE(::testing::Message() << (layer ? "layer " : "rms ") << dtype << ' ' << shape);
        auto trial = rows_of(shape, comm->size(), layer, dtype);
        trial.device = device;
        run(trial, comm, 1);
      }
}

TEST_F(GpuRowNorm, ResidualInTheSamePass) { testing::residual_norm::run_all(new_world(), device); }

TEST_F(GpuRowNorm, RepeatsItsBits) {
  const auto comm = new_world();
  for (const bool layer : {true, false}) {
    auto trial = rows_of({600, 1500}, comm->size(), layer, torch::kBFloat16);
    trial.parameter_dtype = torch::kFloat;
    trial.device = device;
    Norm norm(trial, comm, "repeated");
    torch::manual_seed(5);
    const auto whole = torch::randn({600, 1500}).to(torch::kBFloat16);
    const auto x = testing::columns_of(whole, trial.shards, comm->rank()).to(device);
    const auto dy = torch::randn_like(x);
    std::vector<torch::Tensor> first;
    for (int repeat = 0; repeat < 10; ++repeat) {
      const auto input = x.clone().set_requires_grad(true);
      const auto y = norm.forward(input);
      auto results = torch::autograd::grad({y}, {input, norm.weight()}, {dy});
      results.push_back(y);
      if (repeat == 0) first = results;
      for (size_t i = 0; i < results.size(); ++i)
        EXPECT_TRUE(torch::equal(results[i], first[i])) << i;
    }
  }
}

}  // namespace
}  // namespace syncnorm
