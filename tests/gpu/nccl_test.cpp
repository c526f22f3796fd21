// NCCL: of all ranks where each has a GPU of its own, else of every rank alone; and ranks that
// share a GPU.
#include "syncnorm/nccl.h"

#include "gpu/gpu_test.h"
#include "support/batch_norm_trial.h"
#include "support/row_norm_trial.h"

namespace syncnorm {
namespace {

using testing::new_world;

class GpuNccl : public testing::OnGpu<> {
 protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    world = gpu_for_each_rank() ? new_world() : self_communicator();
    comm = nccl_communicator(world, device);
    rank = comm->rank();
    size = comm->size();
  }

  /// Rank r's part: small integers, which are exact in every dtype.
  torch::Tensor part(int r, int64_t n, torch::ScalarType dtype) const {
    return (torch::arange(n) % 7 + r).to(device, dtype);
  }
  torch::Tensor sum_of_parts(int64_t n, torch::ScalarType dtype) const {
    return ((torch::arange(n) % 7) * size + size * (size - 1) / 2).to(device, dtype);
  }
  /// Uneven, one of none.
  std::vector<int64_t> sizes() const {
    std::vector<int64_t> result(size);
    for (int r = 0; r < size; ++r) result[r] = (r * 3 + 2) % 4;
    return result;
  }

  std::shared_ptr<Communicator> world, comm;
  int rank = 0, size = 1;
};

TEST_F(GpuNccl, ReducesEveryDtype) {
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16,
                           torch::kLong, torch::kInt, torch::kShort, torch::kByte})
    for (const int64_t n : {0, 1, 1000, 1 << 20}) {
      auto tensor = part(rank, n, dtype);
      comm->all_reduce(tensor);
      EXPECT_TRUE(torch::equal(tensor, sum_of_parts(n, dtype))) << dtype << ' ' << n;
    }
  auto highest = part(rank, 10, torch::kFloat);
  comm->all_reduce(highest, ReduceOp::max);
  EXPECT_TRUE(torch::equal(highest, part(size - 1, 10, torch::kFloat)));
}

TEST_F(GpuNccl, GathersScattersAndBroadcasts) {
  std::vector<torch::Tensor> parts;
  for (int r = 0; r < size; ++r)
    parts.push_back(part(r, sizes()[r] * 5, torch::kFloat).view({sizes()[r], 5}));
  EXPECT_TRUE(torch::equal(comm->all_gather(parts[rank], sizes()), torch::cat(parts)));

  int64_t rows = 0, before = 0;
  for (int r = 0; r < size; ++r) {
    if (r < rank) before += sizes()[r];
    rows += sizes()[r];
  }
  const auto mine = part(rank, rows * 5, torch::kFloat).view({rows, 5});
  const auto sum = sum_of_parts(rows * 5, torch::kFloat).view({rows, 5});
  EXPECT_TRUE(
      torch::equal(comm->reduce_scatter(mine, sizes()), sum.narrow(0, before, sizes()[rank])));

  for (int root = 0; root < size; ++root) {
    auto tensor = part(rank, 33, torch::kHalf);
    comm->broadcast(tensor, root);
    EXPECT_TRUE(torch::equal(tensor, part(root, 33, torch::kHalf)));
  }
  comm->barrier();
}

TEST_F(GpuNccl, SplitsIntoPartsOfItsOwn) {
  const auto half = comm->split(rank % 2, -rank);
  auto one = torch::ones({3}, torch::TensorOptions().device(device));
  half->all_reduce(one);
  EXPECT_EQ(one[0].item<float>(), static_cast<float>(half->size()));
  EXPECT_EQ(comm->split(-1, 0), nullptr);
}

TEST_F(GpuNccl, TensorsOfTheHostTakeTheBootstrap) {
  auto tensor = torch::full({4}, rank + 1.0, torch::kDouble);
  comm->all_reduce(tensor);
  EXPECT_EQ(tensor[3].item<double>(), size * (size + 1) / 2.0);
}

TEST_F(GpuNccl, BatchNormEqualsThatOfTheGatheredBatch) {
  std::mt19937 generator(17);
  for (int i = 0; i < 30; ++i) {
    SCOPED_TRACE("trial " + std::to_string(i));
    auto trial = testing::batch_norm::random_trial(generator, size);
    trial.device = device;
    testing::batch_norm::run(trial, comm, i);
  }
}

TEST_F(GpuNccl, RowNormsEqualThoseOfWholeRows) {
  std::mt19937 generator(18);
  for (int i = 0; i < 30; ++i) {
    SCOPED_TRACE("trial " + std::to_string(i));
    auto trial = testing::row_norm::random_trial(generator, size);
    trial.device = device;
    testing::row_norm::run(trial, comm, i);
  }
}

/// NCCL would refuse or hang; the communicator stages through the host instead.
TEST_F(GpuNccl, RanksThatShareAGpuFallBackToMpi) {
  if (gpu_for_each_rank()) GTEST_SKIP() << "each rank has a GPU of its own";
  const auto all = new_world();
  const auto fallback = nccl_communicator(all, device);
  EXPECT_EQ(fallback->size(), all->size());
  auto tensor = torch::ones({5}, torch::TensorOptions().device(device));
  fallback->all_reduce(tensor);
  EXPECT_EQ(tensor[4].item<float>(), static_cast<float>(all->size()));
}

}  // namespace
}  // namespace syncnorm
