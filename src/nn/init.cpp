#include "nn/init.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>

namespace syncnorm {
namespace {

using torch::Tensor;

at::Generator generator_of(uint64_t seed) { return at::detail::createCPUGenerator(seed); }

/// A host tensor of the whole that `shard` is a part of.
Tensor whole_like(const Tensor& shard, const Sharding& sharding) {
  return torch::empty(sharding.whole_shape(shard.sizes()),
                      shard.options().device(torch::kCPU).requires_grad(false));
}

}  // namespace

void init_linear(const Tensor& weight, const Sharding& weight_sharding, const Tensor& bias,
                 const Sharding& bias_sharding, const Initialization& init) {
  const torch::NoGradGuard no_grad;
  auto generator = generator_of(init.seed);
  auto whole = whole_like(weight, weight_sharding);
  const double bound = 1 / std::sqrt(static_cast<double>(whole.size(1)));
  if (init.std) {
    whole.normal_(0, *init.std, generator);
  } else {
    whole.uniform_(-bound, bound, generator);
  }
  weight.copy_(weight_sharding.shard_of(whole.mul_(init.scale)));
  if (!bias.defined()) return;
  auto whole_bias = whole_like(bias, bias_sharding).zero_();
  if (!init.std) whole_bias.uniform_(-bound, bound, generator);
  bias.copy_(bias_sharding.shard_of(whole_bias));
}

void init_embedding(const Tensor& weight, const Sharding& sharding, const Initialization& init) {
  const torch::NoGradGuard no_grad;
  auto whole = whole_like(weight, sharding);
  whole.normal_(0, init.std.value_or(1), generator_of(init.seed));
  weight.copy_(sharding.shard_of(whole.mul_(init.scale)));
}

}  // namespace syncnorm
