#include "syncnorm/linear.h"

#include <ATen/autocast_mode.h>

#include <algorithm>

#include "nn/init.h"
#include "nn/shards.h"
#include "syncnorm/collectives.h"
#include "syncnorm/environment.h"

namespace syncnorm {
namespace {

using torch::Tensor;

std::vector<Range> consecutive_ranges(const std::vector<int64_t>& sizes) {
  std::vector<Range> ranges;
  int64_t offset = 0;
  for (const int64_t size : sizes) {
    ranges.push_back({offset, size});
    offset += size;
  }
  return ranges;
}

/// `ranges`, or balanced ones where there are none, checked: one list for each rank, within the
/// whole, none twice on a rank, together everything.
Sharding sharding_by(const RangesByRank& ranges, const std::shared_ptr<Communicator>& comm,
                     int64_t dim, int64_t extent, const std::string& who, const char* what) {
  if (ranges.empty())
    return Sharding::consecutive(comm, dim, balanced_shards(extent, comm->size()));
  TORCH_CHECK_VALUE(static_cast<int>(ranges.size()) == comm->size(), who, ": ", what,
                    " needs ranges for each of ", comm->size(), " ranks, got ", ranges.size());
  std::vector<bool> held(extent, false);
  for (size_t rank = 0; rank < ranges.size(); ++rank) {
    std::vector<bool> mine(extent, false);
    for (const auto& range : ranges[rank]) {
      TORCH_CHECK_VALUE(range.offset >= 0 && range.size >= 0 && range.offset <= extent &&
                            range.size <= extent - range.offset,
                        who, ": ", what, " of rank ", rank, " has [", range.offset, ", ",
                        range.offset, " + ", range.size, "), which is not within [0, ", extent,
                        ")");
      for (int64_t i = range.offset; i < range.offset + range.size; ++i) {
        TORCH_CHECK_VALUE(!mine[i], who, ": ", what, " of rank ", rank, " has ", i, " twice");
        mine[i] = held[i] = true;
      }
    }
  }
  const auto missing = std::find(held.begin(), held.end(), false);
  TORCH_CHECK_VALUE(missing == held.end(), who, ": ", what, ": no rank has ",
                    missing - held.begin());
  Sharding sharding;
  sharding.comm = comm;
  sharding.dim = dim;
  sharding.extent = extent;
  sharding.ranges = ranges;
  return sharding;
}

std::vector<int64_t> local_sizes(const Sharding& sharding) {
  std::vector<int64_t> sizes;
  for (int r = 0; r < sharding.comm->size(); ++r) sizes.push_back(sharding.local_size(r));
  return sizes;
}

/// Joined in rank order the shards are the whole.
bool is_consecutive(const Sharding& sharding) {
  int64_t next = 0;
  for (const auto& rank : sharding.ranges) {
    for (const auto& range : rank) {
      if (range.size > 0 && range.offset != next) return false;
      next += range.size;
    }
  }
  return next == sharding.extent;
}

void check_features(int64_t in, int64_t out, const std::string& who) {
  TORCH_CHECK_VALUE(in > 0 && out > 0, who, ": in_features and out_features must be positive, got ",
                    in, " and ", out);
}

void check_input(const Tensor& input, int64_t columns, const Tensor& weight,
                 const std::string& who) {
  TORCH_CHECK_VALUE(input.defined(), who, ": the input is undefined");
  TORCH_CHECK_VALUE(input.dim() > 0 && input.size(-1) == columns, who, ": needs an input [..., ",
                    columns, "] on this rank, got ", input.sizes());
  TORCH_CHECK_VALUE(input.device() == weight.device(), who, ": the input is on ", input.device(),
                    ", the weight on ", weight.device());
  const bool casts = at::autocast::is_autocast_enabled(input.device().type());
  TORCH_CHECK_VALUE(casts || input.scalar_type() == weight.scalar_type(), who, ": the input is ",
                    input.scalar_type(), ", the weight ", weight.scalar_type(),
                    ": convert one with .to(...)");
}

Tensor as_rows(const Tensor& x) {
  return x.reshape({c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)), x.size(-1)});
}

Tensor with_leading(const Tensor& rows, const Tensor& like) {
  auto shape = like.sizes().vec();
  shape.back() = rows.size(1);
  return rows.view(shape);
}

/// x W^T + b, [rows, out] with contiguous columns, as collectives over columns send it.
Tensor product_by_columns(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const auto y =
      bias.defined() ? torch::addmm(bias.unsqueeze(1), weight, x.t()) : torch::mm(weight, x.t());
  return y.t();
}

Tensor product(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return bias.defined() ? torch::addmm(bias, x, weight.t()) : torch::mm(x, weight.t());
}

}  // namespace

RangesByRank qkv_rows(int64_t heads, int64_t kv_heads, int64_t head_dim, int ranks) {
  TORCH_CHECK_VALUE(heads > 0 && kv_heads > 0 && head_dim > 0 && ranks > 0 && heads % kv_heads == 0,
                    "qkv_rows: heads (", heads, ") must be a positive multiple of kv_heads (",
                    kv_heads, "), head_dim (", head_dim, ") and ranks (", ranks, ") positive");
  const int64_t group = heads / kv_heads;
  RangesByRank rows;
  for (const auto& q : consecutive_ranges(balanced_shards(heads, ranks))) {
    rows.emplace_back();
    if (q.size == 0) continue;
    const int64_t first = q.offset / group;
    const int64_t used = (q.offset + q.size - 1) / group - first + 1;
    rows.back() = {{q.offset * head_dim, q.size * head_dim},
                   {(heads + first) * head_dim, used * head_dim},
                   {(heads + kv_heads + first) * head_dim, used * head_dim}};
  }
  return rows;
}

RangesByRank head_columns(int64_t heads, int64_t head_dim, int ranks) {
  RangesByRank columns;
  for (const auto& h : consecutive_ranges(balanced_shards(heads, ranks)))
    columns.push_back({{h.offset * head_dim, h.size * head_dim}});
  return columns;
}

RangesByRank gate_up_rows(int64_t intermediate, int ranks) {
  RangesByRank rows;
  for (const auto& part : consecutive_ranges(balanced_shards(intermediate, ranks)))
    rows.push_back({part, {intermediate + part.offset, part.size}});
  return rows;
}

ColumnParallelLinearImpl::ColumnParallelLinearImpl(ColumnParallelLinearOptions options_)
    : NamedModule("ColumnParallelLinear", options_.name()), options(std::move(options_)) {
  options.communicator(communicator_or_world(options.communicator(), display_name()));
  check_features(options.in_features(), options.out_features(), display_name());
  options.in_shard_sizes(sizes_or_balanced(options.in_shard_sizes(), options.in_features(),
                                           options.communicator()->size(), display_name(),
                                           "in_shard_sizes"));
  rows_ = sharding_by(options.rows(), options.communicator(), 0, options.out_features(),
                      display_name(), "rows");
  shares_rows_ = !rows_.shared_ranges().empty();
  TORCH_CHECK_VALUE(!options.gather_output() || is_consecutive(rows_), display_name(),
                    ": gather_output joins the ranks' outputs in order, which needs consecutive "
                    "rows that no ranks share");
  ColumnParallelLinearImpl::reset();
}

void ColumnParallelLinearImpl::reset() {
  const int64_t own = rows_.local_size(rows_.comm->rank());
  weight = register_parameter("weight", torch::empty({own, options.in_features()}));
  bias =
      register_parameter("bias", options.bias() ? torch::empty({own}) : Tensor(), options.bias());
  reset_parameters();
}

void ColumnParallelLinearImpl::reset_parameters() {
  init_linear(weight, rows_, bias, rows_,
              {options.seed(), options.init_std(), options.init_scale()});
}

Tensor ColumnParallelLinearImpl::used_weight() const {
  return shares_rows_ ? sum_shared_gradient(weight, rows_, display_name()) : weight;
}

Tensor ColumnParallelLinearImpl::used_bias() const {
  return shares_rows_ && bias.defined() ? sum_shared_gradient(bias, rows_, display_name()) : bias;
}

Tensor ColumnParallelLinearImpl::forward(const Tensor& input) {
  const auto& comm = options.communicator();
  const auto& sizes = options.in_shard_sizes();
  const bool sharded = options.input_is_sharded();
  check_input(input, sharded ? sizes[comm->rank()] : options.in_features(), weight, display_name());
  const auto x = as_rows(sharded ? gather_columns(input, sizes, comm, display_name())
                                 : copy_to_ranks(input, comm, display_name()));
  if (!options.gather_output()) return with_leading(product(x, used_weight(), used_bias()), input);
  const auto y = product_by_columns(x, used_weight(), used_bias());
  const auto whole = gather_replicated_columns(y, local_sizes(rows_), comm, display_name());
  auto shape = input.sizes().vec();
  shape.back() = options.out_features();
  return whole.reshape(shape);
}

Sharding ColumnParallelLinearImpl::sharding_of(const std::string& name) const {
  return name == "weight" || name == "bias" ? rows_ : Sharding();
}

void ColumnParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "ColumnParallelLinear(in=" << options.in_features()
         << ", out=" << options.out_features()
         << ", out_local=" << rows_.local_size(rows_.comm->rank()) << ", bias=" << options.bias()
         << ", input_is_sharded=" << options.input_is_sharded()
         << ", gather_output=" << options.gather_output() << ")";
}

RowParallelLinearImpl::RowParallelLinearImpl(RowParallelLinearOptions options_)
    : NamedModule("RowParallelLinear", options_.name()), options(std::move(options_)) {
  options.communicator(communicator_or_world(options.communicator(), display_name()));
  const auto& comm = options.communicator();
  check_features(options.in_features(), options.out_features(), display_name());
  options.out_shard_sizes(sizes_or_balanced(options.out_shard_sizes(), options.out_features(),
                                            comm->size(), display_name(), "out_shard_sizes"));
  columns_ =
      sharding_by(options.columns(), comm, 1, options.in_features(), display_name(), "columns");
  TORCH_CHECK_VALUE(columns_.shared_ranges().empty(), display_name(),
                    ": columns that two ranks hold would count twice in the sum");
  if (options.scatter_output())
    outputs_ = Sharding::consecutive(comm, 0, options.out_shard_sizes());
  RowParallelLinearImpl::reset();
}

void RowParallelLinearImpl::reset() {
  const int rank = columns_.comm->rank();
  weight = register_parameter("weight",
                              torch::empty({options.out_features(), columns_.local_size(rank)}));
  const int64_t outputs =
      options.scatter_output() ? options.out_shard_sizes()[rank] : options.out_features();
  bias = register_parameter("bias", options.bias() ? torch::empty({outputs}) : Tensor(),
                            options.bias());
  reset_parameters();
}

void RowParallelLinearImpl::reset_parameters() {
  init_linear(weight, columns_, bias, outputs_,
              {options.seed(), options.init_std(), options.init_scale()});
}

Tensor RowParallelLinearImpl::forward(const Tensor& input) {
  const auto& comm = options.communicator();
  check_input(input, weight.size(1), weight, display_name());
  const auto x = as_rows(input);
  if (!options.scatter_output()) {
    auto y = reduce_from_ranks(product(x, weight, {}), comm, display_name());
    return with_leading(bias.defined() ? y.add_(bias) : y, input);
  }
  auto y = scatter_sum_columns(product_by_columns(x, weight, {}), options.out_shard_sizes(), comm,
                               display_name());
  auto shape = input.sizes().vec();
  shape.back() = y.size(1);
  return (bias.defined() ? y.add_(bias) : y).reshape(shape);
}

Sharding RowParallelLinearImpl::sharding_of(const std::string& name) const {
  if (name == "weight") return columns_;
  return name == "bias" ? outputs_ : Sharding();
}

void RowParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "RowParallelLinear(in=" << options.in_features()
         << ", in_local=" << weight.size(1) << ", out=" << options.out_features()
         << ", bias=" << options.bias() << ", scatter_output=" << options.scatter_output() << ")";
}

}  // namespace syncnorm
