#include "autograd/norm_gather.h"

#include <c10/util/StringUtil.h>

#include <numeric>

#include "comm/fnv1a.h"
#include "comm/signature.h"
#include "comm/statistics_buffer.h"
#include "kernels/kernels.h"

namespace syncnorm {
namespace {

/// Wider values as elements of the dtype that travels, bit by bit.
at::Tensor as_elements(const at::Tensor& values, at::ScalarType dtype) {
  return values.contiguous().view({-1}).view(dtype);
}

/// Its inverse, through a copy, since a block may begin anywhere.
at::Tensor from_elements(const at::Tensor& elements, at::ScalarType dtype) {
  return elements.clone().view(dtype);
}

int64_t elements_a_double(const at::Tensor& x) { return 8 / x.element_size(); }

/// The norm's parameters travel as they are computed with: they may be float beside half columns.
int64_t elements_a_parameter(const at::Tensor& x) { return x.element_size() == 2 ? 2 : 1; }

/// A rank's block of the all-gather: tag, moments, columns, and where centered the norm's
/// parameters. Offsets in elements.
struct Block {
  Block(int64_t columns, int64_t rows, const at::Tensor& x, bool centered, int64_t parameters)
      : moments(StatisticsBuffer::kGatherTag * elements_a_double(x)),
        columns_at(moments + (centered ? 2 : 1) * rows * elements_a_double(x)),
        parameters_at(columns_at + columns * rows),
        size(parameters_at + parameters * columns * elements_a_parameter(x)) {}
  int64_t moments, columns_at, parameters_at, size;
};

/// Double [2 or 1, rows]: this rank's mean and sum of squares about it, or sum of squares.
at::Tensor local_moments(const NormInput& input, const NormLayout& layout) {
  const auto& kernels = kernels::kernels_for(input.data.device());
  const auto columns = static_cast<double>(std::max<int64_t>(layout.cells.inner, 1));
  const auto sums =
      at::empty({layout.sums(), layout.slots}, input.data.options().dtype(at::kDouble));
  kernels.moments(input, layout, {}, sums);
  if (!layout.centered) return sums;
  const auto mean = sums[0] / columns;
  kernels.moments(input, layout, mean, sums);
  const auto rest = sums[0] / columns;
  return at::stack({mean + rest, (sums[1] - sums[0] * rest).clamp_min(0)});
}

/// A power of two near one over the root mean square of each row's columns, or 1: multiplied by it,
/// no column leaves the range of half. double [rows].
at::Tensor range_scale(const at::Tensor& sum_of_squares, int64_t columns) {
  const auto rms = (sum_of_squares / static_cast<double>(std::max<int64_t>(columns, 1))).sqrt();
  const auto exponent = std::get<1>(at::frexp(rms)).to(at::kDouble).clamp(-100, 100);
  return at::where(rms.isfinite(), at::exp2(-exponent), at::ones_like(rms));
}

/// Mean and rstd of whole rows from the ranks' moments, and the distance of each rank's mean.
struct Merged {
  at::Tensor mean, variance, rstd;    // double [rows]
  std::vector<at::Tensor> from_mean;  // double [rows] by rank, undefined where not centered
};

Merged merge(const std::vector<at::Tensor>& moments, const NormLinearCall& call) {
  Merged merged;
  const auto hidden = static_cast<double>(call.hidden());
  const size_t ranks = moments.size();
  auto squares = at::zeros_like(moments[0][0]);
  if (!call.centered) {
    for (const auto& rank : moments) squares = squares + rank[0];
    merged.mean = at::zeros_like(squares);
  } else {
    // Means as distances from one rank's, so that rows far from zero keep their digits.
    const size_t first =
        std::find_if(call.sizes.begin(), call.sizes.end(), [](int64_t size) { return size > 0; }) -
        call.sizes.begin();
    auto shift = at::zeros_like(squares);
    for (size_t r = 0; r < ranks; ++r) {
      merged.from_mean.push_back(moments[r][0] - moments[first][0]);
      if (call.sizes[r] > 0)
        shift = shift + merged.from_mean[r] * (static_cast<double>(call.sizes[r]) / hidden);
    }
    merged.mean = moments[first][0] + shift;
    for (size_t r = 0; r < ranks; ++r) {
      auto& distance = merged.from_mean[r];
      distance = distance - shift;
      if (call.sizes[r] > 0)
        squares =
            squares + moments[r][1] + distance * distance * static_cast<double>(call.sizes[r]);
    }
  }
  merged.variance = squares / hidden;
  merged.rstd = (merged.variance + call.eps).rsqrt();
  return merged;
}

std::string describe(const at::Tensor& x, const NormLinearCall& call, int64_t parameters,
                     const char* pass) {
  // Ranks that cut the rows in other ways would take each other's columns for what they are not.
  const auto cut = c10::Join(" ", call.sizes);
  Signature signature;
  signature.add("pass", pass)
      .add("norm", call.centered ? "layer" : "rms")
      .add("rows", x.size(0))
      .add("hidden", call.hidden())
      .add("out features", call.out_features)
      .add("dtype", c10::toString(x.scalar_type()))
      .add("eps", call.eps)
      .add("norm parameters", parameters)
      .add("keep gathered", call.keep_gathered ? "yes" : "no")
      .add("backward", call.has_backward ? "yes" : "no");
  constexpr size_t kReadable = 64;  // of many ranks; the field has to fit into messages
  if (cut.size() <= kReadable) return signature.add("columns by rank", cut).text();
  return signature.add("columns by rank (hash)", fnv1a(cut)).text();
}

/// A rank's part does not fit into one element of half types: its rest rides in a second, so that
/// where parts cancel only their sum's rounding remains.
int64_t elements_a_mean(const at::Tensor& gradient) { return gradient.element_size() == 2 ? 2 : 1; }

}  // namespace

int64_t NormLinearCall::hidden() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

GatheredRows gather_normalized(const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& bias, const NormLinearCall& call,
                               const char* pass) {
  const int rank = call.comm->rank();
  const auto dtype = x.scalar_type();
  const auto compute = compute_dtype(dtype);
  const int64_t rows = x.size(0), columns = x.size(1);
  const auto layout = row_layout(x, call.hidden(), call.centered);
  const NormInput input(x, layout);
  const auto moments = local_moments(input, layout);
  const int64_t parameters =
      call.centered ? (weight.defined() ? 1 : 0) + (bias.defined() ? 1 : 0) : 0;

  std::vector<Block> blocks;
  std::vector<int64_t> sizes;
  for (const int64_t size : call.sizes) {
    blocks.emplace_back(size, rows, x, call.centered, parameters);
    sizes.push_back(blocks.back().size);
  }
  const auto& mine = blocks[rank];
  auto shard = at::empty({mine.size}, x.options().requires_grad(false));
  shard.narrow(0, mine.moments, mine.columns_at - mine.moments).copy_(as_elements(moments, dtype));
  auto scale = range_scale(moments[moments.size(0) - 1], columns).to(compute).view({1, rows});
  auto values = input.data.to(compute).view({rows, columns}).t();
  if (call.centered) values = values - moments[0].to(compute);
  values = values * scale;
  if (!call.centered && weight.defined()) values = values * weight.to(compute).view({columns, 1});
  shard.narrow(0, mine.columns_at, columns * rows).view({columns, rows}).copy_(values);
  if (parameters > 0) {
    std::vector<at::Tensor> own;
    for (const auto& values : {weight, bias})
      if (values.defined()) own.push_back(values.to(compute));
    shard.narrow(0, mine.parameters_at, mine.size - mine.parameters_at)
        .copy_(as_elements(at::cat(own), dtype));
  }
  const auto all =
      StatisticsBuffer::gather(call.comm, shard, sizes, describe(x, call, parameters, pass));

  std::vector<at::Tensor> parts, of_rank;
  int64_t at = 0;
  for (size_t r = 0; r < blocks.size(); at += blocks[r++].size) {
    parts.push_back(all.narrow(0, at, blocks[r].size));
    of_rank.push_back(from_elements(parts[r].narrow(0, blocks[r].moments,
                                                    blocks[r].columns_at - blocks[r].moments),
                                    at::kDouble)
                          .view({moments.size(0), rows}));
  }
  const auto merged = merge(of_rank, call);
  GatheredRows result;
  result.statistics = at::stack({merged.mean, merged.variance, merged.rstd});
  result.normalized = at::empty({call.hidden(), rows}, shard.options());
  std::vector<at::Tensor> weights, biases;
  at = 0;
  for (size_t r = 0; r < blocks.size(); at += call.sizes[r++]) {
    const int64_t size = call.sizes[r];
    if (size == 0) continue;
    const auto back = merged.rstd / range_scale(of_rank[r][of_rank[r].size(0) - 1], size);
    auto u = parts[r].narrow(0, blocks[r].columns_at, size * rows).view({size, rows}).to(compute) *
             back.to(compute);
    if (call.centered) u += (merged.from_mean[r] * merged.rstd).to(compute);
    if (parameters > 0) {
      const auto theirs = from_elements(
          parts[r].narrow(0, blocks[r].parameters_at, blocks[r].size - blocks[r].parameters_at),
          compute);
      weights.push_back(theirs.narrow(0, 0, size));
      u *= weights.back().view({size, 1});
      if (bias.defined()) {
        biases.push_back(theirs.narrow(0, size, size));
        u += biases.back().view({size, 1});
      }
    }
    result.normalized.narrow(0, at, size).copy_(u);
  }
  if (!weights.empty()) result.weight = at::cat(weights);
  if (!biases.empty()) result.bias = at::cat(biases);
  return result;
}

ScatteredGradient scatter_gradient(const at::Tensor& gradient, const GatheredRows& rows,
                                   const NormLinearCall& call) {
  const auto compute = compute_dtype(gradient.scalar_type());
  const int64_t count = gradient.size(1);
  const auto hidden = static_cast<double>(call.hidden());
  // sum_h g_h xhat_h = sum_h dU_h (U_h - bias_h), so xhat itself is not needed.
  const auto du = gradient.to(compute);
  auto u = rows.normalized.to(compute);
  if (rows.bias.defined()) u = u - rows.bias.to(compute).view({-1, 1});
  std::vector<at::Tensor> means;
  if (call.centered) {
    const auto g = rows.weight.defined() ? du * rows.weight.to(compute).view({-1, 1}) : du;
    means.push_back(g.sum(0, false, at::kDouble) / hidden);
  }
  means.push_back((du * u).sum(0, false, at::kDouble) / hidden);

  const int64_t repeats = elements_a_mean(gradient);
  std::vector<at::Tensor> extra;
  for (const auto& mean : means) {
    extra.push_back(mean.to(gradient.scalar_type()));
    if (repeats == 2)
      extra.push_back((mean - extra.back().to(at::kDouble)).to(gradient.scalar_type()));
  }
  const auto statistics = at::cat(extra);
  std::vector<at::Tensor> blocks;
  std::vector<int64_t> sizes;
  int64_t at = 0;
  for (const int64_t size : call.sizes) {
    blocks.push_back(gradient.narrow(0, at, size).reshape({-1}));
    blocks.push_back(statistics);
    sizes.push_back(size * count + statistics.numel());
    at += size;
  }
  const auto mine = call.comm->reduce_scatter(at::cat(blocks), sizes);
  const int64_t columns = call.sizes[call.comm->rank()];
  ScatteredGradient result;
  result.of_columns = mine.narrow(0, 0, columns * count).view({columns, count}).t().contiguous();
  result.sums = mine.narrow(0, columns * count, statistics.numel())
                    .view({static_cast<int64_t>(means.size()), repeats, count})
                    .to(at::kDouble)
                    .sum(1) *
                hidden;  // means travel, since sums could leave the range of half
  return result;
}

}  // namespace syncnorm
