#pragma once

#include <torch/torch.h>

#include <cmath>
#include <map>
#include <string>

#include "syncnorm/transformer.h"

namespace syncnorm::testing {

/// Whole parameters of a block by name.
using Parameters = std::map<std::string, torch::Tensor>;

/// The whole parameters of the block that `options` describe, whatever the ranks: those of the same
/// block on one, in double and with their gradients wanted.
inline Parameters whole_parameters(ParallelTransformerBlockOptions options) {
  options.communicator(self_communicator()).hidden_shards({});
  ParallelTransformerBlock block(options);
  Parameters parameters;
  for (const auto& item : block->named_parameters())
    parameters[item.key()] = item.value().detach().to(torch::kDouble).set_requires_grad(true);
  return parameters;
}

/// A transformer block in plain operations, to compare with: written from the papers, shares
/// nothing with the library but names.
class PlainBlock {
 public:
  PlainBlock(ParallelTransformerBlockOptions options, Parameters parameters)
      : o_(std::move(options)), p_(std::move(parameters)) {}

  torch::Tensor forward(const torch::Tensor& x) const {
    const auto middle = add(x, attention(x), "attention_norm");
    return add(middle, mlp(middle), "mlp_norm");
  }

 private:
  torch::Tensor get(const std::string& name) const {
    const auto found = p_.find(name);
    return found == p_.end() ? torch::Tensor() : found->second;
  }

  torch::Tensor norm(const torch::Tensor& x, const std::string& name) const {
    const auto weight = get(name + ".weight");
    if (o_.norm() == NormKind::layer)
      return torch::layer_norm(x, {x.size(-1)}, weight, get(name + ".bias"),
                               o_.eps().value_or(1e-5));
    return at::rms_norm(x, {x.size(-1)}, weight, o_.eps().value_or(1e-6));
  }

  torch::Tensor linear(const torch::Tensor& x, const std::string& name) const {
    return torch::linear(x, get(name + ".weight"), get(name + ".bias"));
  }

  torch::Tensor add(const torch::Tensor& x, const torch::Tensor& f, const std::string& name) const {
    switch (o_.placement()) {
      case Placement::pre:
        return x + f;
      case Placement::post:
        return norm(x + f, name);
      case Placement::sandwich:
        return x + norm(f, name);
      default:
        return norm(o_.deepnorm()->alpha * x + f, name);
    }
  }

  torch::Tensor input_of(const torch::Tensor& x, const std::string& part) const {
    const bool before = o_.placement() == Placement::pre || o_.placement() == Placement::sandwich;
    return linear(before ? norm(x, part + ".in_proj.norm") : x, part + ".in_proj.linear");
  }

  /// [batch, heads, positions, dim], complex numbers turned by their position.
  torch::Tensor rotary(const torch::Tensor& x) const {
    if (!o_.rope_theta()) return x;
    const int64_t half = x.size(-1) / 2;
    auto turned = torch::empty_like(x);
    const auto z =
        torch::complex(x.slice(-1, 0, half).contiguous(), x.slice(-1, half).contiguous());
    std::vector<torch::Tensor> columns;
    for (int64_t i = 0; i < half; ++i) {
      const double speed =
          std::pow(*o_.rope_theta(), -2.0 * static_cast<double>(i) / static_cast<double>(2 * half));
      const auto angle = torch::arange(x.size(2), torch::kDouble) * speed;
      columns.push_back(z.select(-1, i) * torch::polar(torch::ones_like(angle), angle));
    }
    const auto all = torch::stack(columns, -1);
    return torch::cat({torch::real(all), torch::imag(all)}, -1);
  }

  torch::Tensor attention(const torch::Tensor& x) const {
    const int64_t heads = o_.heads(), kv = o_.kv_heads().value_or(heads);
    const int64_t dim = o_.head_dim().value_or(o_.hidden() / heads);
    const auto all = input_of(x, "attention");
    auto parts = all.split({heads * dim, kv * dim, kv * dim}, -1);
    auto q = parts[0], k = parts[1];
    if (o_.qk_norm() == QKNormSpan::width) {
      q = at::rms_norm(q, {heads * dim}, get("attention.qk_norm.q_weight"), 1e-6);
      k = at::rms_norm(k, {kv * dim}, get("attention.qk_norm.k_weight"), 1e-6);
    }
    const auto by_head = [&](const torch::Tensor& y, int64_t n) {
      return y.view({x.size(0), x.size(1), n, dim}).transpose(1, 2);
    };
    q = by_head(q, heads);
    k = by_head(k, kv);
    if (o_.qk_norm() == QKNormSpan::head) {
      q = at::rms_norm(q, {dim}, get("attention.qk_norm.q_weight"), 1e-6);
      k = at::rms_norm(k, {dim}, get("attention.qk_norm.k_weight"), 1e-6);
    }
    k = rotary(k).repeat_interleave(heads / kv, 1);
    const auto v = by_head(parts[2], kv).repeat_interleave(heads / kv, 1);
    auto scores =
        torch::matmul(rotary(q), k.transpose(-1, -2)) / std::sqrt(static_cast<double>(dim));
    if (o_.softcap()) scores = (scores / *o_.softcap()).tanh() * *o_.softcap();
    if (o_.causal()) {
      const auto future = torch::ones({x.size(1), x.size(1)}, torch::kBool).triu(1);
      scores = scores.masked_fill(future, -std::numeric_limits<double>::infinity());
    }
    const auto y = torch::matmul(scores.softmax(-1), v).transpose(1, 2).flatten(-2);
    return linear(y, "attention.out_proj");
  }

  torch::Tensor mlp(const torch::Tensor& x) const {
    const auto y = input_of(x, "mlp");
    if (o_.activation() == Activation::gelu) return linear(torch::gelu(y), "mlp.out_proj");
    const auto parts = y.chunk(2, -1);
    return linear(torch::silu(parts[0]) * parts[1], "mlp.out_proj");
  }

  ParallelTransformerBlockOptions o_;
  Parameters p_;
};

}  // namespace syncnorm::testing
