// SyncBatchNorm on the rank's GPU, statistics through the host: against batch norm in double on the
// gathered batch, and what streams, autocast and failures ask of a device.
#include "syncnorm/sync_batch_norm.h"

#include <ATen/autocast_mode.h>
#include <c10/cuda/CUDAGuard.h>

#include "gpu/gpu_test.h"
#include "support/batch_norm_trial.h"
#include "support/fused_batch_norm_trial.h"

namespace syncnorm {
namespace {

using testing::bit_equal_across;
using testing::message_of;
using testing::new_world;
using testing::relative_difference;

/// Operations on GPUs in bfloat16 while it lives.
struct Autocast {
  Autocast() {
    at::autocast::set_autocast_dtype(at::kCUDA, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCUDA, true);
  }
  ~Autocast() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCUDA, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

class GpuSyncBatchNorm : public testing::OnGpu<> {
 protected:
  torch::TensorOptions options() const { return torch::TensorOptions().device(device); }

  SyncBatchNorm module(int64_t channels, const std::shared_ptr<Communicator>& comm) const {
    SyncBatchNorm norm(SyncBatchNormOptions(channels).communicator(comm).name("norm"));
    norm->to(device);
    return norm;
  }

  /// Output, gradients and buffers of one step.
  std::vector<torch::Tensor> step(SyncBatchNorm& norm, const torch::Tensor& x,
                                  const torch::Tensor& dy) const {
    norm->zero_grad();
    const auto input = x.detach().set_requires_grad(true);
    const auto y = norm->forward(input);
    y.backward(dy);
    return {y,
            input.grad(),
            norm->weight.grad().clone(),
            norm->bias.grad().clone(),
            norm->running_mean.clone(),
            norm->running_var.clone()};
  }
};

TEST_F(GpuSyncBatchNorm, EqualsBatchNormOnTheGatheredBatch) {
  const auto comm = new_world();
  std::mt19937 generator(2024);
  for (int i = 0; i < 60; ++i) {
    SCOPED_TRACE("trial " + std::to_string(i));
    auto trial = testing::batch_norm::random_trial(generator, comm->size());
    trial.device = device;
    testing::batch_norm::run(trial, comm, i);
  }
}

/// Sizes that take several blocks a channel, or a block for several.
TEST_F(GpuSyncBatchNorm, LargeAndSmallChannels) {
  const auto comm = new_world();
  for (const auto& shape : std::vector<std::vector<int64_t>>{
           {4, 2, 1 << 18}, {8, 3, 112, 112}, {8, 2048, 7, 7}, {4096, 65}, {6, 16, 8, 20, 20}})
    for (const auto format : {torch::MemoryFormat::Contiguous, torch::MemoryFormat::ChannelsLast})
      for (const auto dtype : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
        if (shape.size() != 4 && format != torch::MemoryFormat::Contiguous) continue;
        SCOPED_TRACE(::testing::Message() << shape << ' ' << format << ' ' << dtype);
        testing::batch_norm::Trial trial;
        trial.shape = shape;
        trial.shards.assign(comm->size(), 0);
        trial.shards.back() = shape[0] - 1;
        ++trial.shards[0];
        trial.dtype = dtype;
        trial.parameter_dtype = torch::kFloat;
        trial.format = format;
        trial.device = device;
        testing::batch_norm::run(trial, comm, 6);
      }
}

TEST_F(GpuSyncBatchNorm, ResidualAndReluInTheSamePass) {
  testing::fused_batch_norm::run_all(new_world(), device);
}

TEST_F(GpuSyncBatchNorm, RepeatsItsBits) {
  const auto comm = new_world();
  torch::manual_seed(3 + comm->rank());
  const auto x = torch::randn({16, 33, 57, 5}).to(device), dy = torch::randn_like(x);
  std::vector<torch::Tensor> first;
  for (int repeat = 0; repeat < 10; ++repeat) {
    auto norm = module(33, comm);
    const auto results = step(norm, x, dy);
    if (repeat == 0) first = results;
    for (size_t i = 0; i < results.size(); ++i)
      EXPECT_TRUE(torch::equal(results[i], first[i])) << i;
  }
}

TEST_F(GpuSyncBatchNorm, BuffersStayEqualOverManyUnevenSteps) {
  const auto comm = new_world();
  auto norm = module(6, comm);
  std::mt19937 generator(11);
  for (int i = 0; i < 50; ++i) {
    const auto sizes = testing::random_shards(5, comm->size(), generator);
    torch::manual_seed(i * 17 + comm->rank());
    const auto x = torch::randn({sizes[comm->rank()], 6, 3, 3}).to(device) * (1 + comm->rank());
    norm->forward(x).sum().backward();
  }
  EXPECT_TRUE(bit_equal_across(*comm, norm->running_mean));
  EXPECT_TRUE(bit_equal_across(*comm, norm->running_var));
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 50);
}

/// Work queued before and after on the caller's stream keeps its place, without the host waiting.
TEST_F(GpuSyncBatchNorm, WorksOnTheCurrentStream) {
  const auto comm = new_world();
  torch::manual_seed(9 + comm->rank());
  const auto x = torch::randn({8, 64, 56, 56}).to(device), dy = torch::randn_like(x);
  auto norm = module(64, comm);
  const auto expected = step(norm, x * 3 + 1, dy);
  c10::cuda::device_synchronize();
  for (int i = 0; i < 4; ++i) {
    auto again = module(64, comm);
    std::vector<torch::Tensor> results;
    const auto stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index());
    {
      const c10::cuda::CUDAStreamGuard guard(stream);
      auto late = torch::zeros_like(x);
      for (int spin = 0; spin < 50; ++spin) late.add_(x).sub_(x);
      late.copy_(x * 3 + 1);
      results = step(again, late, dy);
      late.zero_();  // after the last kernel that reads it
    }
    stream.synchronize();
    for (size_t k = 0; k < results.size(); ++k)
      EXPECT_TRUE(torch::equal(results[k], expected[k])) << k;
  }
}

/// A bfloat16 stream into float parameters, as autocast leaves it.
TEST_F(GpuSyncBatchNorm, UnderAutocast) {
  const auto comm = new_world();
  torch::manual_seed(4);
  torch::nn::Linear linear(torch::nn::LinearOptions(24, 32).bias(false));
  linear->to(device);
  auto norm = module(32, comm);
  torch::manual_seed(40 + comm->rank());
  const auto x = torch::randn({12, 24}).to(device);
  torch::Tensor hidden, y;
  {
    const Autocast autocast;
    hidden = linear->forward(x);
    y = norm->forward(hidden);
  }
  EXPECT_EQ(hidden.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(norm->running_var.scalar_type(), torch::kFloat);
  const auto gathered =
      comm->all_gather(hidden.detach().to(torch::kDouble), std::vector<int64_t>(comm->size(), 12));
  const auto whole = torch::batch_norm(gathered, {}, {}, {}, {}, true, 0, 1e-5, false);
  EXPECT_LT(relative_difference(y, whole.narrow(0, 12 * comm->rank(), 12)), 1.5 * 0x1p-8);
  y.to(torch::kFloat).square().sum().backward();
  EXPECT_EQ(linear->weight.grad().scalar_type(), torch::kFloat);
  EXPECT_TRUE(norm->weight.grad().isfinite().all().item<bool>());
}

TEST_F(GpuSyncBatchNorm, EvaluationCommunicatesNothing) {
  const auto comm = new_world();
  auto norm = module(5, comm);
  norm->forward(torch::randn({4, 5, 6}, options()));
  norm->eval();
  comm->reset_counters();
  const auto x = torch::randn({3, 5, 6}, options());
  const auto y = norm->forward(x);
  EXPECT_EQ(comm->counters().collectives(), 0);
  const auto expected = torch::batch_norm(x, norm->weight, norm->bias, norm->running_mean,
                                          norm->running_var, false, 0, 1e-5, false);
  EXPECT_LT(relative_difference(y, expected), 16 * 0x1p-24);
}

/// Later steps may find out what an earlier one's ranks disagreed about, but every rank does.
TEST_F(GpuSyncBatchNorm, DisagreementReachesEveryRank) {
  const auto comm = new_world();
  if (comm->size() == 1) GTEST_SKIP() << "needs two ranks";
  SyncBatchNorm norm(
      SyncBatchNormOptions(4).eps(comm->rank() == 0 ? 1e-5 : 1e-3).communicator(comm).name("norm"));
  norm->to(device);
  const auto message = message_of<CommunicationError>([&] {
    for (int i = 0; i < 3; ++i) {
      norm->forward(torch::randn({2, 4, 3, 3}, options()));
      c10::cuda::device_synchronize();
    }
  });
  EXPECT_NE(message.find("norm"), std::string::npos) << message;
  EXPECT_TRUE(torch::equal(norm->running_var.cpu(), torch::ones({4})));
}

TEST_F(GpuSyncBatchNorm, OneValueAChannelIsAnError) {
  const auto comm = new_world();
  auto norm = module(4, comm);
  const int64_t samples = comm->rank() == 0 ? 1 : 0;
  EXPECT_THROW(
      for (int i = 0; i < 3; ++i) {
        norm->forward(torch::randn({samples, 4}, options()));
        c10::cuda::device_synchronize();
      },
      c10::Error);
}

}  // namespace
}  // namespace syncnorm
