// What a small norm costs beside its arithmetic, as counts that do not depend on the machine: nodes
// of the autograd graph, tensors that are allocated, operators that are dispatched. The bounds are
// what the code does now; lower them when it does less.
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <unordered_set>

#include "support/world.h"
#include "syncnorm/sync_batch_norm.h"
#include "syncnorm/tensor_parallel_norm.h"

namespace syncnorm {
namespace {

using testing::new_world;

struct AllocationCount : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void* /*data*/, int64_t size, size_t /*allocated*/, size_t /*reserved*/,
                         c10::Device /*device*/) override {
    if (size > 0) ++count;
  }
  bool memoryProfilingEnabled() const override { return true; }

  int64_t count = 0;
};

thread_local int64_t operators = 0;

std::unique_ptr<at::ObserverContext> count_operator(const at::RecordFunction& /*called*/) {
  ++operators;
  return nullptr;
}

struct Cost {
  int64_t allocations = 0, operators = 0;
};

template <typename Body>
Cost cost_of(Body&& body) {
  const auto allocations = std::make_shared<AllocationCount>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, allocations);
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(count_operator).scopes({at::RecordScope::FUNCTION}));
  operators = 0;
  body();
  at::removeCallback(handle);
  return {allocations->count, operators};
}

/// Nodes of the graph behind `y` but those that end in a leaf.
size_t graph_nodes(const torch::Tensor& y) {
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> open{y.grad_fn().get()};
  size_t inner = 0;
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (node->num_outputs() > 0) ++inner;
    for (const auto& edge : node->next_edges()) open.push_back(edge.function.get());
  }
  return inner;
}

struct Bound {
  Cost forward, backward;
};

template <typename Forward>
void check(const torch::Tensor& x, const Bound& bound, Forward&& forward) {
  for (int warm_up = 0; warm_up < 2; ++warm_up) forward().sum().backward();
  const auto dy = torch::ones_like(x);
  torch::Tensor y;
  const auto there = cost_of([&] { y = forward(); });
  EXPECT_EQ(graph_nodes(y), 1);
  x.mutable_grad() = torch::Tensor();
  const auto back = cost_of([&] { y.backward(dy); });
  EXPECT_LE(there.allocations, bound.forward.allocations);
  EXPECT_LE(there.operators, bound.forward.operators);
  EXPECT_LE(back.allocations, bound.backward.allocations);
  EXPECT_LE(back.operators, bound.backward.operators);
}

class Allocation : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* other : {"SYNCNORM_KERNELS", "SYNCNORM_CHECK"})
      if (std::getenv(other) != nullptr) GTEST_SKIP() << other << " makes tensors of its own";
  }
};

TEST_F(Allocation, TrainingStepOfSyncBatchNorm) {
  const auto comm = new_world();
  SyncBatchNorm norm(SyncBatchNormOptions(64).communicator(comm));
  for (const auto format : {torch::MemoryFormat::Contiguous, torch::MemoryFormat::ChannelsLast}) {
    SCOPED_TRACE(format);
    auto x = torch::randn({2, 64, 7, 7}).contiguous(format).requires_grad_();
    check(x, {{5, 13}, {5, 18}}, [&] { return norm->forward(x); });
  }
}

TEST_F(Allocation, TrainingStepOfNormSumAndRelu) {
  const auto comm = new_world();
  SyncBatchNorm norm(SyncBatchNormOptions(64).relu(true).communicator(comm));
  auto x = torch::randn({2, 64, 7, 7}).requires_grad_();
  auto residual = torch::randn({2, 64, 7, 7}).requires_grad_();
  check(x, {{5, 14}, {6, 22}}, [&] { return norm->forward(x, residual); });
}

TEST_F(Allocation, TrainingStepOfRowNorms) {
  const auto comm = new_world();
  TensorParallelLayerNorm layer(TensorParallelLayerNormOptions(64).communicator(comm));
  TensorParallelRMSNorm rms(TensorParallelRMSNormOptions(64).communicator(comm));
  auto x = torch::randn({8, layer->weight.size(0)}).requires_grad_();
  auto residual = torch::randn_like(x).requires_grad_();
  check(x, {{3, 7}, {5, 18}}, [&] { return layer(x); });
  check(x, {{3, 7}, {4, 15}}, [&] { return rms(x); });
  check(x, {{4, 10}, {5, 18}}, [&] { return rms(x, residual).first; });
}

}  // namespace
}  // namespace syncnorm
