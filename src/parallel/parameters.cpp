#include "syncnorm/parameters.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "syncnorm/environment.h"

namespace syncnorm {
namespace {

using torch::Tensor;

constexpr const char* kWho = "clip_grad_norm";

/// Those that have a gradient, each once.
std::vector<ShardedTensor> with_gradients(const std::vector<ShardedTensor>& parameters,
                                          const Communicator& comm) {
  std::vector<ShardedTensor> result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& parameter : parameters) {
    const auto& sharding = parameter.sharding;
    TORCH_CHECK_VALUE(
        sharding.replicated() ||
            (sharding.comm->size() == comm.size() && sharding.comm->rank() == comm.rank()),
        kWho, ": parameter '", parameter.name, "' is cut for ",
        sharding.replicated() ? 0 : sharding.comm->size(), " ranks, the group given has ",
        comm.size(), "; pass the group over which the model's shards lie");
    if (!parameter.tensor.defined() || !parameter.tensor.grad().defined()) continue;
    TORCH_CHECK_VALUE(parameter.tensor.grad().layout() == torch::kStrided, kWho,
                      ": the gradient of parameter '", parameter.name,
                      "' is not dense; only dense ones are supported");
    if (seen.insert(parameter.tensor.unsafeGetTensorImpl()).second) result.push_back(parameter);
  }
  return result;
}

/// Sum of |g|^p over the elements that this rank counts, or the largest |g|, in double.
Tensor own_part(const ShardedTensor& parameter, double p, int rank) {
  const auto& sharding = parameter.sharding;
  const auto gradient = parameter.tensor.grad().detach();
  if (gradient.numel() == 0 || (sharding.replicated() && rank != 0))
    return torch::zeros({}, torch::kDouble);
  if (std::isinf(p)) return gradient.abs().max().to(torch::kDouble);
  if (sharding.replicated() || sharding.shared_ranges().empty())
    return at::linalg_vector_norm(gradient, p, {}, false, torch::kDouble).pow(p);
  std::vector<int64_t> others;
  for (int64_t dim = 0; dim < gradient.dim(); ++dim) {
    if (dim != sharding.dim) others.push_back(dim);
  }
  auto powers = gradient.to(torch::kDouble).abs().pow(p);
  if (!others.empty()) powers = powers.sum(others);
  return (powers / sharding.copies().to(gradient.device())).sum();
}

}  // namespace

double clip_grad_norm(const std::vector<ShardedTensor>& parameters, double max_norm,
                      const std::shared_ptr<Communicator>& comm, double norm_type,
                      bool error_if_nonfinite) {
  const auto group = communicator_or_world(comm, kWho);
  TORCH_CHECK_VALUE(norm_type > 0, kWho, ": norm_type must be positive, got ", norm_type);
  TORCH_CHECK_VALUE(max_norm >= 0, kWho, ": max_norm cannot be negative, got ", max_norm);
  const auto counted = with_gradients(parameters, *group);
  const bool largest = std::isinf(norm_type);
  const auto device = counted.empty() ? c10::Device(c10::kCPU) : counted.front().tensor.device();
  auto total = torch::zeros({1}, torch::dtype(torch::kDouble).device(device));
  for (const auto& parameter : counted) {
    const auto part = own_part(parameter, norm_type, group->rank()).to(device);
    total = largest ? torch::maximum(total, part) : total + part;
  }
  const ModuleScope scope(kWho);
  if (largest) {
    // MPI's largest of doubles may drop a NaN; as integers, numbers that are not negative keep
    // their order and NaN comes behind infinity.
    total.abs_();
    group->all_reduce(total.view(torch::kLong), ReduceOp::max);
  } else {
    group->all_reduce(total);
  }
  const double sum = total.item<double>();
  const double norm = largest ? sum : std::pow(sum, 1 / norm_type);
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(norm), kWho, ": the norm of the gradients is ",
              norm, "; nothing was changed");
  const double scale = max_norm / (norm + 1e-6);
  if (scale >= 1) return norm;
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : counted) parameter.tensor.grad().mul_(scale);
  return norm;
}

double clip_grad_norm(const torch::nn::Module& module, double max_norm,
                      const std::shared_ptr<Communicator>& comm, double norm_type,
                      bool error_if_nonfinite) {
  return clip_grad_norm(sharded_tensors(module, /*buffers=*/false), max_norm, comm, norm_type,
                        error_if_nonfinite);
}

}  // namespace syncnorm
