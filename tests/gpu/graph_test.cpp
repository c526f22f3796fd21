// Forward and backward as CUDA graphs: which kernels are queued, and that replays compute anew.
#include "gpu/graph.h"

#include <c10/cuda/CUDAGuard.h>

#include "gpu/gpu_test.h"
#include "support/row_norm_trial.h"
#include "support/world.h"
#include "syncnorm/nccl.h"
#include "syncnorm/sync_batch_norm.h"

namespace syncnorm {
namespace {

using testing::Graph;

class GpuGraph : public testing::OnGpu<> {
 protected:
  /// Groups that a graph can hold: this process alone, and NCCL's of as many ranks as have GPUs.
  std::vector<std::shared_ptr<Communicator>> groups() const {
    const auto bootstrap = gpu_for_each_rank() ? testing::new_world() : self_communicator();
    return {self_communicator(), nccl_communicator(bootstrap, device)};
  }

  /// Kernels that one more call of `body` queues; it must queue nothing else. What is made once a
  /// graph, the counters of blocks, is in both that are compared.
  int kernels_of(const std::function<void()>& body) const {
    const Graph once(device, body);
    const Graph thrice(device, [&] {
      for (int i = 0; i < 3; ++i) body();
    });
    EXPECT_EQ(thrice.copies(), once.copies());
    EXPECT_EQ((thrice.kernels() - once.kernels()) % 2, 0);
    return (thrice.kernels() - once.kernels()) / 2;
  }

  torch::Tensor values(at::IntArrayRef shape, torch::ScalarType dtype = torch::kFloat) const {
    return torch::randn(shape).to(device, dtype);
  }
};

/// Moments, the all-reduce where there is another rank, apply.
int kernels_of_a_pass(const Communicator& comm) { return comm.size() > 1 ? 3 : 2; }

TEST_F(GpuGraph, BatchNormQueuesTwoKernelsAndTheAllReduce) {
  for (const auto& comm : groups())
    for (const bool channels_last : {false, true})
      for (const bool fused : {false, true}) {
        SCOPED_TRACE(comm->name() + (channels_last ? " channels-last" : "") +
                     (fused ? " fused" : ""));
        SyncBatchNorm norm(SyncBatchNormOptions(24).relu(fused).communicator(comm).name("norm"));
        norm->to(device);
        auto x = values({8, 24, 28, 28}, torch::kBFloat16);
        if (channels_last) x = x.contiguous(torch::MemoryFormat::ChannelsLast);
        const auto residual =
            fused ? torch::randn_like(x).set_requires_grad(true) : torch::Tensor();
        const auto dy = torch::randn_like(x);
        x.set_requires_grad(true);
        EXPECT_EQ(kernels_of([&] { norm->forward(x, residual); }), kernels_of_a_pass(*comm));
        const auto both = kernels_of([&] {
          std::vector<torch::Tensor> inputs{x, norm->weight, norm->bias};
          if (fused) inputs.push_back(residual);
          torch::autograd::grad({norm->forward(x, residual)}, inputs, {dy});
        });
        EXPECT_EQ(both, 2 * kernels_of_a_pass(*comm));
      }
}

TEST_F(GpuGraph, RowNormsQueueTwoKernelsAndTheAllReduce) {
  for (const auto& comm : groups())
    for (const bool layer : {true, false}) {
      SCOPED_TRACE(comm->name() + (layer ? " layer" : " rms"));
      auto trial = testing::row_norm::rows_of({512, 768}, comm->size(), layer, torch::kBFloat16);
      trial.bias = layer;
      trial.device = device;
      testing::row_norm::Norm norm(trial, comm, "norm");
      const auto x =
          values({512, trial.shards[comm->rank()]}, torch::kBFloat16).set_requires_grad(true);
      const auto dy = torch::randn_like(x);
      EXPECT_EQ(kernels_of([&] { norm.forward(x); }), kernels_of_a_pass(*comm));
      const auto both = kernels_of([&] {
        torch::autograd::grad({norm.forward(x)}, {x, norm.weight()}, {dy});
      });
      EXPECT_EQ(both, 2 * kernels_of_a_pass(*comm));
    }
}

/// A graph's step on new values has the bits of the same step queued call by call.
TEST_F(GpuGraph, ReplayedStepsEqualQueuedOnes) {
  for (const auto& comm : groups()) {
    SCOPED_TRACE(comm->name());
    const auto options = SyncBatchNormOptions(16).relu(true).communicator(comm).name("norm");
    SyncBatchNorm recorded(options), queued(options);
    recorded->to(device);
    queued->to(device);
    torch::manual_seed(7 + comm->rank());
    auto x = values({4, 16, 20, 20}).set_requires_grad(true);
    const auto dy = values({4, 16, 20, 20});
    std::vector<torch::Tensor> results;
    const auto step = [&](SyncBatchNorm& norm) {
      const auto y = norm->forward(x);
      results = torch::autograd::grad({y}, {x, norm->weight, norm->bias}, {dy});
      results.push_back(y.detach());
    };
    const Graph graph(device, [&] { step(recorded); });
    const auto of_graph = results;
    // Recording warmed up with three steps and did not run.
    for (int i = 0; i < 3; ++i) step(queued);
    for (int i = 0; i < 3; ++i) {
      {
        const torch::NoGradGuard no_grad;
        x.copy_(values({4, 16, 20, 20}) * (i + 1) + i);
        dy.copy_(values({4, 16, 20, 20}));
      }
      graph.replay();
      step(queued);
      c10::cuda::device_synchronize();
      for (size_t k = 0; k < results.size(); ++k)
        EXPECT_TRUE(torch::equal(of_graph[k], results[k])) << "step " << i << ", tensor " << k;
      EXPECT_TRUE(torch::equal(recorded->running_mean, queued->running_mean));
      EXPECT_TRUE(torch::equal(recorded->running_var, queued->running_var));
      EXPECT_TRUE(torch::equal(recorded->num_batches_tracked, queued->num_batches_tracked));
    }
    EXPECT_EQ(recorded->num_batches_tracked.item<int64_t>(), 6);
  }
}

/// A rank without samples takes part: rank 0 where there are several, or else the only one.
TEST_F(GpuGraph, EmptyRank) {
  for (const auto& comm : groups()) {
    SCOPED_TRACE(comm->name());
    SyncBatchNorm norm(SyncBatchNormOptions(8).communicator(comm).name("norm"));
    norm->to(device);
    const int64_t samples = comm->rank() == 0 ? 0 : 3;
    auto x = values({samples, 8, 5, 5}).set_requires_grad(true);
    const auto dy = torch::ones_like(x);
    std::vector<torch::Tensor> gradients;
    const Graph graph(device, [&] {
      gradients = torch::autograd::grad({norm->forward(x)}, {x, norm->weight, norm->bias}, {dy});
    });
    const auto batches = norm->num_batches_tracked.item<int64_t>();
    graph.replay();
    EXPECT_EQ(gradients[0].sizes(), x.sizes());
    EXPECT_EQ(gradients[2].sum().item<double>(), static_cast<double>(samples * 8 * 25));
    EXPECT_TRUE(norm->running_var.isfinite().all().item<bool>());
    if (comm->size() == 1) {
      EXPECT_TRUE(torch::equal(norm->running_var.cpu(), torch::ones({8})));
    } else {
      EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), batches + 1);
    }
  }
}

/// Two recordings replayed beside each other share nothing.
TEST_F(GpuGraph, TwoGraphsAtOnce) {
  const auto comm = self_communicator();
  const auto x = values({32, 64, 28, 28});
  SyncBatchNorm first(SyncBatchNormOptions(64).communicator(comm));
  SyncBatchNorm second(SyncBatchNormOptions(64).communicator(comm));
  first->to(device);
  second->to(device);
  const auto other = x * 2 + 1;
  torch::Tensor y, z;
  const Graph one(device, [&] { y = first->forward(x); });
  const Graph two(device, [&] { z = second->forward(other); });
  one.replay();
  two.replay();
  const auto alone_y = y.clone(), alone_z = z.clone();
  for (int i = 0; i < 20; ++i) {
    one.launch();
    two.launch();
  }
  c10::cuda::device_synchronize();
  EXPECT_TRUE(torch::equal(y, alone_y));
  EXPECT_TRUE(torch::equal(z, alone_z));
}

}  // namespace
}  // namespace syncnorm
