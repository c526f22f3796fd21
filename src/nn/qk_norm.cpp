#include "syncnorm/qk_norm.h"

#include "comm/signature.h"
#include "nn/norm_checks.h"
#include "nn/prepared_norm.h"
#include "syncnorm/collectives.h"
#include "syncnorm/environment.h"
#include "syncnorm/linear.h"

namespace syncnorm {
namespace {

/// The whole tensor [heads * head_dim] of Q or K, cut by heads.
Sharding cut(std::shared_ptr<Communicator> comm, const RangesByRank& qkv, size_t which,
             int64_t begin, int64_t heads, int64_t head_dim) {
  Sharding shard;
  shard.comm = std::move(comm);
  shard.extent = heads * head_dim;
  for (const auto& ranges : qkv) {
    const auto range = ranges.empty() ? Range{begin, 0} : ranges[which];  // a rank without heads
    shard.ranges.push_back({{range.offset - begin, range.size}});
  }
  return shard;
}

/// 1 for the key heads of rank `rank` that no lower rank holds, otherwise 0.
std::vector<double> counted_here(const Sharding& k, int64_t head_dim, int rank) {
  const auto mine = k.ranges[rank].front();
  std::vector<double> counted;
  for (int64_t at = mine.offset; at < mine.offset + mine.size; at += head_dim) {
    bool first = true;
    for (int r = 0; r < rank; ++r) {
      const auto& other = k.ranges[r].front();
      first = first && (at < other.offset || at >= other.offset + other.size);
    }
    counted.push_back(first ? 1 : 0);
  }
  return counted;
}

}  // namespace

QKNormImpl::QKNormImpl(QKNormOptions options_)
    : NamedModule("QKNorm", options_.name()), options(std::move(options_)) {
  QKNormImpl::reset();
}

void QKNormImpl::reset() {
  const int64_t heads = options.heads(), kv = options.kv_heads(), dim = options.head_dim();
  comm_ = communicator_or_world(options.communicator(), display_name());
  const auto qkv = qkv_rows(heads, kv, dim, comm_->size());
  q_shard_ = cut(comm_, qkv, 0, 0, heads, dim);
  k_shard_ = cut(comm_, qkv, 1, heads * dim, kv, dim);
  const auto parameter = [&](const Sharding& shard) {
    if (!options.affine()) return torch::Tensor();
    return torch::empty(
        {options.span() == QKNormSpan::head ? dim : shard.local_size(comm_->rank())});
  };
  q_weight = register_parameter("q_weight", parameter(q_shard_), options.affine());
  k_weight = register_parameter("k_weight", parameter(k_shard_), options.affine());
  reset_parameters();
}

void QKNormImpl::reset_parameters() {
  if (!q_weight.defined()) return;
  torch::nn::init::ones_(q_weight);
  torch::nn::init::ones_(k_weight);
}

Sharding QKNormImpl::sharding_of(const std::string& name) const {
  if (options.span() == QKNormSpan::head) return {};
  return name == "q_weight" ? q_shard_ : k_shard_;
}

/// [q + k heads, head_dim], its gradient summed over the ranks where they hold copies.
torch::Tensor QKNormImpl::weight_by_head() const {
  const int64_t dim = options.head_dim();
  if (!q_weight.defined()) return {};
  if (options.span() == QKNormSpan::width) {
    const auto k = sum_shared_gradient(k_weight, k_shard_, display_name());
    return torch::cat({q_weight, k}).view({-1, dim});
  }
  const auto heads = [&](const Sharding& shard) { return shard.local_size(comm_->rank()) / dim; };
  const auto both = sum_gradient(torch::stack({q_weight, k_weight}), comm_, display_name());
  return torch::cat(
      {both[0].expand({heads(q_shard_), dim}), both[1].expand({heads(k_shard_), dim})});
}

std::pair<torch::Tensor, torch::Tensor> QKNormImpl::forward(const torch::Tensor& q,
                                                            const torch::Tensor& k) {
  const auto& name = display_name();
  const int64_t dim = options.head_dim();
  const int rank = comm_->rank();
  const int64_t q_heads = q_shard_.local_size(rank) / dim,
                k_heads = k_shard_.local_size(rank) / dim;
  check_norm_input(q, name);
  check_norm_input(k, name);
  const auto fits = [&](const torch::Tensor& x, int64_t heads) {
    return x.dim() >= 2 && x.size(-1) == dim && x.size(-2) == heads;
  };
  TORCH_CHECK_VALUE(fits(q, q_heads) && fits(k, k_heads) &&
                        q.sizes().slice(0, q.dim() - 2) == k.sizes().slice(0, k.dim() - 2) &&
                        q.scalar_type() == k.scalar_type(),
                    name, ": rank ", rank, " expects q [..., ", q_heads, ", ", dim,
                    "] and k [..., ", k_heads, ", ", dim, "] of one dtype, got ", q.sizes(),
                    " and ", k.sizes());
  for (const auto& weight : {q_weight, k_weight})
    check_norm_parameter(weight, "weight", weight.defined() ? weight.sizes() : q.sizes(), q, name);
  check_eps(options.eps(), name);

  const bool width = options.span() == QKNormSpan::width;
  const int64_t heads = q_heads + k_heads;
  const auto x = torch::cat({q, k}, -2);
  const int64_t rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 2));
  PreparedNorm norm;
  norm.comm = width ? comm_ : self_communicator();
  norm.name = name;
  norm.part.eps = options.eps();
  auto& layout = norm.part.layout;
  layout.cells = {1, rows * heads, dim};
  layout.centered = options.norm() == NormKind::layer;
  layout.affine_rows = heads;
  layout.by_column = true;
  layout.values = heads * dim;
  const auto doubles = x.options().dtype(torch::kDouble).requires_grad(false);
  if (width) {
    layout.unit = "rows";
    layout.slots = 2 * rows;
    auto part = torch::zeros({heads}, torch::kLong);
    part.slice(0, q_heads, heads).fill_(1);
    layout.slot_of_cell =
        (torch::arange(rows).mul(2).view({-1, 1}) + part).reshape({-1}).to(x.device());
    layout.count.each =
        torch::tensor({static_cast<double>(q_shard_.extent), static_cast<double>(k_shard_.extent)},
                      torch::kDouble)
            .repeat({rows})
            .to(x.device());
    auto counted = std::vector<double>(q_heads, 1);
    const auto keys = counted_here(k_shard_, dim, rank);
    counted.insert(counted.end(), keys.begin(), keys.end());
    layout.share = torch::tensor(counted, doubles).repeat({rows});
  } else {
    layout.unit = "heads";
    layout.slots = layout.cells.cells;
    layout.count.all = static_cast<double>(dim);
  }
  norm.tensors.x = x;
  norm.tensors.weight = weight_by_head();
  norm.tensors.details = Signature()
                             .add("norm", layout.centered ? "layer" : "rms")
                             .add("heads", options.heads())
                             .add("key heads", options.kv_heads())
                             .add("head_dim", dim)
                             .text();
  const auto y = run_norm(std::move(norm)).front();
  return {y.narrow(-2, 0, q_heads), y.narrow(-2, q_heads, k_heads)};
}

void QKNormImpl::pretty_print(std::ostream& stream) const {
  stream << "QKNorm(heads=" << options.heads() << ", kv_heads=" << options.kv_heads()
         << ", head_dim=" << options.head_dim()
         << ", span=" << (options.span() == QKNormSpan::head ? "head" : "width")
         << ", norm=" << (options.norm() == NormKind::layer ? "layer" : "rms")
         << ", eps=" << options.eps() << ")";
}

}  // namespace syncnorm
