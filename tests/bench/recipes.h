#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "harness.h"
#include "syncnorm/environment.h"

/// What the benchmarks' contestants share.
namespace syncnorm::bench {

inline const std::shared_ptr<Communicator>& world() { return Environment::current()->world(); }

/// Sum over ranks in forward, and of gradients in backward: how norms are synchronised in plain
/// tensor operations.
struct SumOverRanks : torch::autograd::Function<SumOverRanks> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& local) {
    auto sum = local.clone();
    world()->all_reduce(sum);
    return sum;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    auto sum = gradients[0].clone();
    world()->all_reduce(sum);
    return {sum};
  }
};

/// A streaming loop as a node of autograd's graph over contiguous tensors: what a norm that
/// computes as that loop does costs at least in LibTorch, with output, gradients and graph made in
/// every step. The loop outlives the graph and serves one at a time, since it keeps what its
/// backward needs.
template <typename Loop>
struct InGraph : torch::autograd::Function<InGraph<Loop>> {
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, const torch::Tensor& x,
                               const torch::Tensor& weight, const torch::Tensor& bias, Loop* loop) {
    ctx->save_for_backward({x, weight, bias});
    ctx->saved_data["loop"] = reinterpret_cast<int64_t>(loop);
    auto y = torch::empty_like(x);
    loop->forward(x.const_data_ptr<float>(), y.template data_ptr<float>());
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    auto& loop = *reinterpret_cast<Loop*>(
        ctx->saved_data["loop"].toInt());  // NOLINT(performance-no-int-to-ptr)
    auto dx = torch::empty_like(saved[0]);
    loop.backward(saved[0].const_data_ptr<float>(), gradients[0].const_data_ptr<float>(),
                  dx.template data_ptr<float>());
    return {dx, of_parameter(saved[1], loop.dweight()), of_parameter(saved[2], loop.dbias()), {}};
  }

 private:
  static torch::Tensor of_parameter(const torch::Tensor& parameter, const float* gradient) {
    auto copy = torch::empty_like(parameter);
    std::copy_n(gradient, parameter.numel(), copy.template data_ptr<float>());
    return copy;
  }
};

using Tensors = std::vector<torch::Tensor>;

/// What a step of training does with the outputs of a norm: backward from given gradients to the
/// leaves.
struct Problem {
  Tensors leaves;
  Tensors output_gradients;

  /// Backward; frees the leaves' gradients, so that the next step does not add to them.
  void step(const Tensors& outputs) {
    torch::autograd::backward(outputs, output_gradients);
    clear();
  }

  /// The outputs, then the leaves' gradients.
  Tensors results(const Tensors& outputs) {
    torch::autograd::backward(outputs, output_gradients);
    Tensors all;
    for (const auto& output : outputs) all.push_back(output.detach());
    for (const auto& leaf : leaves) all.push_back(leaf.grad());
    clear();
    return all;
  }

 private:
  void clear() {
    for (auto& leaf : leaves) leaf.mutable_grad() = torch::Tensor();
  }
};

/// Raises where two contestants' results differ.
inline void compare(const Tensors& results, const Tensors& expected, double tolerance,
                    const std::string& what) {
  TORCH_CHECK(results.size() == expected.size(), what, " has other results");
  for (size_t i = 0; i < expected.size(); ++i)
    expect_close(results[i], expected[i], tolerance,
                 what + ", result " + std::to_string(i) + " (outputs, then gradients)");
}

/// As compare(), by the norm of the difference over the norm: where rounding takes a value to the
/// other side of a ReLU's corner, a single gradient is another one.
inline void compare_norms(const Tensors& results, const Tensors& expected, double tolerance,
                          const std::string& what) {
  TORCH_CHECK(results.size() == expected.size(), what, " has other results");
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto reference = expected[i].to(torch::kDouble);
    const double difference = (results[i].to(torch::kDouble) - reference).norm().item<double>();
    const double norm = reference.norm().item<double>();
    // Written so that a NaN fails.
    TORCH_CHECK(difference <= tolerance * norm, what, ", result ", i,
                " (outputs, then gradients): the difference has norm ", difference, " beside ",
                norm, ", so there is nothing to time");
  }
}

inline torch::Tensor copy_of(const float* from, torch::IntArrayRef shape) {
  return torch::from_blob(const_cast<float*>(from), shape).clone();
}

}  // namespace syncnorm::bench
