#pragma once

#include <torch/torch.h>

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "syncnorm/communicator.h"

namespace syncnorm {

/// Options of DistributedDataParallel, with the meanings of PyTorch's class of the same name.
struct DistributedDataParallelOptions {
  /// Ranks that hold replicas; null is the living Environment's world.
  TORCH_ARG(std::shared_ptr<Communicator>, communicator) = nullptr;
  /// Bytes of gradients reduced together; the first bucket is at most 1 MiB.
  TORCH_ARG(int64_t, bucket_cap_bytes) = 25 * 1024 * 1024;
  /// Search each graph for parameters that the outputs do not reach. Without it such a parameter is
  /// an error.
  TORCH_ARG(bool, find_unused_parameters) = false;
  /// Gradients are views of the buckets: one copy less. Then do not call detach_() on them, and
  /// zero_grad keeps them.
  TORCH_ARG(bool, gradient_as_bucket_view) = false;
  /// Before each training forward, buffers of modules other than SyncBatchNorm take rank 0's
  /// values.
  TORCH_ARG(bool, broadcast_buffers) = true;
};

/// What DistributedDataParallel does, without the module's type. See there.
class DataParallelReducer {
 public:
  DataParallelReducer(std::shared_ptr<torch::nn::Module> module,
                      const DistributedDataParallelOptions& options);
  ~DataParallelReducer();
  DataParallelReducer(const DataParallelReducer&) = delete;
  DataParallelReducer& operator=(const DataParallelReducer&) = delete;

  void before_forward();
  void after_forward(const std::vector<torch::Tensor>& outputs);
  bool set_sync(bool enabled);
  const std::shared_ptr<Communicator>& communicator() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

namespace detail {
inline void collect_tensors(std::vector<torch::Tensor>& into, const torch::Tensor& t) {
  into.push_back(t);
}
inline void collect_tensors(std::vector<torch::Tensor>& into,
                            const std::vector<torch::Tensor>& list) {
  into.insert(into.end(), list.begin(), list.end());
}
template <typename... T>
void collect_tensors(std::vector<torch::Tensor>& into, const std::tuple<T...>& outputs) {
  std::apply([&](const auto&... each) { (collect_tensors(into, each), ...); }, outputs);
}
}  // namespace detail

/// Data parallelism for a module holder `M` (torch::nn::Sequential, your own TORCH_MODULE, ...):
/// one replica a rank, gradients averaged over ranks by libtorch's c10d::Reducer in buckets that
/// overlap the backward pass.
///
/// Construction broadcasts rank 0's parameters and buffers and checks that all ranks hold the same
/// ones; collective. Call the wrapper instead of the module; build the optimizer over
/// module()->parameters(). forward may return a Tensor, a vector or a tuple of them.
template <typename M>
class DistributedDataParallel {
 public:
  explicit DistributedDataParallel(M module, DistributedDataParallelOptions options = {})
      : module_(std::move(module)),
        reducer_(std::make_shared<DataParallelReducer>(module_.ptr(), options)) {}

  template <typename... Args>
  auto forward(Args&&... args) {
    reducer_->before_forward();
    auto outputs = module_->forward(std::forward<Args>(args)...);
    std::vector<torch::Tensor> tensors;
    detail::collect_tensors(tensors, outputs);
    reducer_->after_forward(tensors);
    return outputs;
  }
  template <typename... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  M& module() { return module_; }
  M& operator->() { return module_; }

  /// While the returned guard lives, forwards and their backwards accumulate gradients without
  /// communicating.
  class NoSyncGuard {
   public:
    explicit NoSyncGuard(std::shared_ptr<DataParallelReducer> reducer)
        : reducer_(std::move(reducer)), previous_(reducer_->set_sync(false)) {}
    ~NoSyncGuard() { reducer_->set_sync(previous_); }
    NoSyncGuard(const NoSyncGuard&) = delete;
    NoSyncGuard& operator=(const NoSyncGuard&) = delete;

   private:
    std::shared_ptr<DataParallelReducer> reducer_;
    bool previous_;
  };
  [[nodiscard]] NoSyncGuard no_sync() { return NoSyncGuard(reducer_); }

 private:
  M module_;
  std::shared_ptr<DataParallelReducer> reducer_;
};

}  // namespace syncnorm
