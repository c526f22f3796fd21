#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <functional>
#include <map>
#include <utility>

namespace syncnorm::testing {

/// What a function queues on a stream of its own, recorded as a CUDA graph. Memory that it
/// allocates belongs to the graph, as with at::cuda::CUDAGraph, whose library the tests do not
/// link.
class Graph {
 public:
  /// Runs `body` three times before it is recorded, so that what is made once is there.
  Graph(c10::Device device, const std::function<void()>& body);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  cudaStream_t stream() const { return stream_.stream(); }
  /// Queues what was recorded on the graph's stream.
  void launch() const;
  /// Runs it after everything queued on the device, and waits for it.
  void replay() const;

  /// Nodes of a type.
  int kernels() const { return count(cudaGraphNodeTypeKernel); }
  int copies() const { return count(cudaGraphNodeTypeMemcpy) + count(cudaGraphNodeTypeMemset); }

 private:
  int count(cudaGraphNodeType type) const;
  void record(const std::function<void()>& body);

  c10::Device device_;
  c10::cuda::CUDAStream stream_;
  std::pair<unsigned long long, unsigned long long> pool_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
  std::map<cudaGraphNodeType, int> nodes_;
};

}  // namespace syncnorm::testing
