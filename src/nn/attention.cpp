#include "syncnorm/attention.h"

#include <cmath>

#include "kernels/layout.h"
#include "nn/child.h"
#include "syncnorm/environment.h"

namespace syncnorm {
namespace {

/// Rotates the pairs (i, i + dim/2) of every head of `x` [batch, positions, heads, dim] by
/// position * theta^(-2i/dim), in float or wider.
torch::Tensor rotate(const torch::Tensor& x, int64_t first_position, double theta) {
  const int64_t half = x.size(-1) / 2;
  const auto options = x.options().dtype(torch::kDouble).requires_grad(false);
  const auto frequency =
      torch::pow(theta, torch::arange(half, options) * (-1.0 / static_cast<double>(half)));
  const auto angle =
      torch::arange(first_position, first_position + x.size(1), options).view({-1, 1, 1}) *
      frequency;
  const auto compute = compute_dtype(x.scalar_type());
  const auto cos = angle.cos().to(compute), sin = angle.sin().to(compute);
  const auto wide = x.to(compute);
  const auto a = wide.narrow(-1, 0, half), b = wide.narrow(-1, half, half);
  return torch::cat({a * cos - b * sin, b * cos + a * sin}, -1).to(x.scalar_type());
}

/// True where query i of the last `queries` of `keys` positions sees key j.
torch::Tensor causal_mask(int64_t queries, int64_t keys, c10::Device device) {
  return torch::ones({queries, keys}, torch::TensorOptions().dtype(torch::kBool).device(device))
      .tril(keys - queries);
}

torch::Tensor capped_attention(const torch::Tensor& q, const torch::Tensor& k,
                               const torch::Tensor& v, double cap, const torch::Tensor& mask) {
  const auto compute = compute_dtype(q.scalar_type());
  const double scale = 1 / std::sqrt(static_cast<double>(q.size(-1)));
  auto scores = torch::matmul(q.to(compute) * (scale / cap), k.to(compute).transpose(-1, -2));
  scores = scores.tanh() * cap;
  if (mask.defined())
    scores = scores.masked_fill(mask.logical_not(), -std::numeric_limits<double>::infinity());
  return torch::matmul(scores.softmax(-1), v.to(compute)).to(q.scalar_type());
}

}  // namespace

ParallelAttentionImpl::ParallelAttentionImpl(ParallelAttentionOptions options_)
    : NamedModule("ParallelAttention", options_.name()), options(std::move(options_)) {
  const auto& name = display_name();
  options.communicator(communicator_or_world(options.communicator(), name));
  const int64_t hidden = options.hidden(), heads = options.heads();
  options.kv_heads(options.kv_heads().value_or(heads));
  TORCH_CHECK_VALUE(
      hidden > 0 && heads > 0 && *options.kv_heads() > 0 && heads % *options.kv_heads() == 0, name,
      ": hidden (", hidden, ") and heads (", heads, ") must be positive, kv_heads (",
      *options.kv_heads(), ") a divisor of heads");
  TORCH_CHECK_VALUE(options.head_dim() || hidden % heads == 0, name, ": hidden (", hidden,
                    ") is not a multiple of heads (", heads, "); give head_dim");
  options.head_dim(options.head_dim().value_or(hidden / heads));
  TORCH_CHECK_VALUE(*options.head_dim() > 0, name, ": head_dim must be positive");
  TORCH_CHECK_VALUE(!options.rope_theta() || *options.head_dim() % 2 == 0, name,
                    ": rotary embedding needs an even head_dim, got ", *options.head_dim());
  TORCH_CHECK_VALUE(options.rope_theta().value_or(1) > 0, name,
                    ": rope_theta must be positive, got ", options.rope_theta().value_or(1));
  TORCH_CHECK_VALUE(!options.softcap() || *options.softcap() > 0, name,
                    ": softcap must be positive");
  ParallelAttentionImpl::reset();
}

void ParallelAttentionImpl::reset() {
  const auto& comm = options.communicator();
  const int64_t heads = options.heads(), kv = *options.kv_heads(), dim = *options.head_dim();
  const bool sharded = options.residual() == Residual::sharded;
  const auto rows = qkv_rows(heads, kv, dim, comm->size());
  in_proj = register_module(
      "in_proj", NormColumnParallelLinear(
                     NormColumnParallelLinearOptions(options.hidden(), (heads + 2 * kv) * dim)
                         .norm(options.norm())
                         .eps(options.eps())
                         .residual(options.residual())
                         .in_shard_sizes(options.hidden_shards())
                         .rows(rows)
                         .bias(options.bias())
                         .seed(child_seed(options.seed(), 0))
                         .init_std(options.init_std())
                         .communicator(comm)
                         .name(child_name(options.name(), "in_proj"))));
  if (options.qk_norm()) {
    qk_norm = register_module("qk_norm", QKNorm(QKNormOptions(heads, dim)
                                                    .kv_heads(kv)
                                                    .span(*options.qk_norm())
                                                    .communicator(comm)
                                                    .name(child_name(options.name(), "qk_norm"))));
  }
  out_proj = register_module(
      "out_proj", RowParallelLinear(RowParallelLinearOptions(heads * dim, options.hidden())
                                        .columns(head_columns(heads, dim, comm->size()))
                                        .scatter_output(sharded)
                                        .out_shard_sizes(options.hidden_shards())
                                        .bias(options.bias())
                                        .seed(child_seed(options.seed(), 1))
                                        .init_std(options.init_std())
                                        .init_scale(options.out_init_scale())
                                        .communicator(comm)
                                        .name(child_name(options.name(), "out_proj"))));

  const auto mine = qkv_rows(heads, kv, 1, comm->size())[comm->rank()];
  q_heads_ = k_heads_ = 0;
  key_of_query_.clear();
  if (mine.empty()) return;
  q_heads_ = mine[0].size;
  k_heads_ = mine[1].size;
  for (int64_t q = mine[0].offset; q < mine[0].offset + q_heads_; ++q)
    key_of_query_.push_back(q / (heads / kv) - (mine[1].offset - heads));
  const torch::NoGradGuard no_grad;
  in_proj->linear->weight.narrow(0, (q_heads_ + k_heads_) * dim, k_heads_ * dim)
      .mul_(options.value_init_scale());
}

torch::Tensor ParallelAttentionImpl::attend(const torch::Tensor& q, const torch::Tensor& k,
                                            const torch::Tensor& v) const {
  if (q.numel() == 0) return q;
  const auto index = torch::tensor(key_of_query_, torch::kLong).to(q.device());
  const bool each_its_own = k_heads_ == q_heads_;
  const auto keys = each_its_own ? k : k.index_select(1, index);
  const auto values = each_its_own ? v : v.index_select(1, index);
  const int64_t queries = q.size(2), positions = k.size(2);
  const bool masked = options.causal() && queries > 1;
  torch::Tensor mask;
  if (masked && (options.softcap() || queries != positions))
    mask = causal_mask(queries, positions, q.device());
  if (options.softcap()) return capped_attention(q, keys, values, *options.softcap(), mask);
  return at::scaled_dot_product_attention(
      q, keys, values, mask.defined() ? std::optional(mask) : std::nullopt, /*dropout_p=*/0,
      /*is_causal=*/masked && !mask.defined());
}

torch::Tensor ParallelAttentionImpl::forward(const torch::Tensor& input, KeyValueCache* cache) {
  TORCH_CHECK_VALUE(input.defined() && input.dim() == 3, display_name(),
                    ": expected an input [batch, positions, features], got ",
                    input.defined() ? c10::str(input.sizes()) : "an undefined tensor");
  const int64_t dim = *options.head_dim();
  const bool goes_on = cache != nullptr && cache->length() > 0;
  if (goes_on)
    TORCH_CHECK_VALUE(cache->key.size(0) == input.size(0) && cache->key.size(1) == k_heads_,
                      display_name(), ": the cache holds keys ", cache->key.sizes(),
                      ", which do not go with input ", input.sizes());
  const auto heads =
      in_proj(input).view({input.size(0), input.size(1), q_heads_ + 2 * k_heads_, dim});
  auto q = heads.narrow(2, 0, q_heads_), k = heads.narrow(2, q_heads_, k_heads_);
  auto v = heads.narrow(2, q_heads_ + k_heads_, k_heads_).transpose(1, 2);
  if (!qk_norm.is_empty()) std::tie(q, k) = qk_norm->forward(q, k);
  if (options.rope_theta()) {
    const int64_t first = cache != nullptr ? cache->length() : 0;
    q = rotate(q, first, *options.rope_theta());
    k = rotate(k, first, *options.rope_theta());
  }
  q = q.transpose(1, 2);
  k = k.transpose(1, 2);
  if (cache != nullptr) {
    if (goes_on) {
      k = torch::cat({cache->key, k}, 2);
      v = torch::cat({cache->value, v}, 2);
    }
    cache->key = k;
    cache->value = v;
  }
  const auto y =
      attend(q, k, v).transpose(1, 2).reshape({input.size(0), input.size(1), q_heads_ * dim});
  return out_proj(y);
}

void ParallelAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "ParallelAttention(hidden=" << options.hidden()
         << ", heads=" << options.heads() << ", kv_heads=" << *options.kv_heads()
         << ", head_dim=" << *options.head_dim() << ", heads_local=" << q_heads_
         << ", causal=" << options.causal() << ")";
}

}  // namespace syncnorm
