#include "gpu/graph.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <exception>
#include <vector>

namespace syncnorm::testing {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

unsigned long long next_pool() {
  static unsigned long long last = 0;
  return ++last;
}

}  // namespace

Graph::Graph(c10::Device device, const std::function<void()>& body)
    : device_(device),
      stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())),
      pool_(next_pool(), 0) {
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  {
    const c10::cuda::CUDAStreamGuard guard(stream_);
    for (int i = 0; i < 3; ++i) body();
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    record(body);
  }
  size_t count = 0;
  C10_CUDA_CHECK(cudaGraphGetNodes(graph_, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  C10_CUDA_CHECK(cudaGraphGetNodes(graph_, nodes.data(), &count));
  for (const auto node : nodes) {
    cudaGraphNodeType type{};
    C10_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
    ++nodes_[type];
  }
  C10_CUDA_CHECK(cudaGraphInstantiate(&executable_, graph_, 0));
}

void Graph::record(const std::function<void()>& body) {
  const auto stream = stream_.stream();
  allocator::beginAllocateToPool(device_.index(), pool_,
                                 [stream](cudaStream_t other) { return other == stream; });
  std::exception_ptr failure;
  C10_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  try {
    body();
  } catch (...) {
    failure = std::current_exception();
  }
  // In any case: the stream must not stay in capture.
  const auto status = cudaStreamEndCapture(stream, &graph_);
  allocator::endAllocateToPool(device_.index(), pool_);
  if (failure) std::rethrow_exception(failure);
  C10_CUDA_CHECK(status);
}

Graph::~Graph() {
  cudaDeviceSynchronize();
  cudaGraphExecDestroy(executable_);
  cudaGraphDestroy(graph_);
  allocator::releasePool(device_.index(), pool_);
}

void Graph::launch() const { C10_CUDA_CHECK(cudaGraphLaunch(executable_, stream_.stream())); }

void Graph::replay() const {
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  launch();
  C10_CUDA_CHECK(cudaDeviceSynchronize());
}

int Graph::count(cudaGraphNodeType type) const {
  const auto found = nodes_.find(type);
  return found == nodes_.end() ? 0 : found->second;
}

}  // namespace syncnorm::testing
