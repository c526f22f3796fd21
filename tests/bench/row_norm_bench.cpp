// Forward and backward of norms over rows whose columns are split over the ranks, beside
//   aten       ATen's own norm of each rank's columns alone: no communication, another result
//   streaming  plain loops over floats with the same two all-reduces, no framework
//   in_graph   that loop as a node of autograd's graph: the least that LibTorch adds
//   gather     the rows gathered and normalised whole on every rank
//   by_hand    the split norm in tensor operations
//   triad      z = x + s*y over arrays of the same size: what memory gives
// then norm(x, residual) beside sum and norm apart, and NormColumnParallelLinear beside norm and
// linear layer apart and the linear layer alone.
// launch/run -n 2 bench_row_norm_bench [--benchmark_filter=REGEX] [--benchmark_out=FILE]
#include <torch/torch.h>

#include <memory>
#include <numeric>
#include <vector>

#include "harness.h"
#include "recipes.h"
#include "streaming.h"
#include "syncnorm/syncnorm.h"

namespace {

namespace bench = syncnorm::bench;
using syncnorm::NormKind;

// x for the sums, x and y to apply; x and dy for the sums, x, dy and dx to apply.
constexpr double kPasses = 8;

struct Input {
  NormKind kind;
  int64_t rows, hidden;
  torch::Dtype dtype = torch::kFloat;

  bool layer() const { return kind == NormKind::layer; }
  double eps() const { return layer() ? 1e-5 : 1e-6; }
  std::vector<int64_t> shards() const {
    return syncnorm::balanced_shards(hidden, bench::world()->size());
  }
  std::string name(const std::string& form) const {
    return (layer() ? "LayerNorm" : "RMSNorm") + form + "/" + bench::shape_text({rows, hidden}) +
           "/contiguous/" + c10::toString(dtype);
  }
  /// Of rank 0, which has no fewer columns than any other.
  int64_t bytes() const {
    return rows * shards()[0] * static_cast<int64_t>(c10::elementSize(dtype));
  }
};

torch::Tensor aten(const torch::Tensor& x, const Input& input, const torch::Tensor& weight,
                   const torch::Tensor& bias) {
  return input.layer() ? torch::layer_norm(x, {x.size(-1)}, weight, bias, input.eps())
                       : at::rms_norm(x, {x.size(-1)}, weight, input.eps());
}

struct Rows : bench::Problem {
  explicit Rows(const Input& which) : input(which) {
    const int rank = bench::world()->rank();
    const auto shards = input.shards();
    start = std::accumulate(shards.begin(), shards.begin() + rank, int64_t{0});
    own = shards[static_cast<size_t>(rank)];
    torch::manual_seed(rank);
    x = torch::randn({input.rows, own}).to(input.dtype).set_requires_grad(true);
    dy = torch::randn({input.rows, own}).to(input.dtype);
    whole_weight = (1 + 0.1 * torch::linspace(-1, 1, input.hidden)).to(input.dtype);
    whole_bias = (0.1 * torch::linspace(1, -1, input.hidden)).to(input.dtype);
    make_norm();
    whole_weight.set_requires_grad(true);
    whole_bias.set_requires_grad(true);
    leaves = {x, weight};
    if (bias.defined()) leaves.push_back(bias);
    output_gradients = {dy};
  }

  torch::Tensor ours() { return input.layer() ? layer->forward(x) : rms->forward(x); }

  syncnorm::NormAndResidual ours(const torch::Tensor& residual) {
    return input.layer() ? layer(x, residual) : rms(x, residual);
  }

  Input input;
  int64_t start = 0, own = 0;
  torch::Tensor x, dy, weight, bias, whole_weight, whole_bias;
  syncnorm::TensorParallelLayerNorm layer = nullptr;  // one of the two; its parameters are
  syncnorm::TensorParallelRMSNorm rms = nullptr;      // weight and bias

 private:
  void make_norm() {
    torch::NoGradGuard no_grad;
    const auto shard = [this](const torch::Tensor& whole) { return whole.narrow(0, start, own); };
    if (input.layer()) {
      layer = syncnorm::TensorParallelLayerNorm(
          syncnorm::TensorParallelLayerNormOptions(input.hidden).eps(input.eps()).name("layer"));
      layer->to(input.dtype);
      weight = layer->weight.copy_(shard(whole_weight));
      bias = layer->bias.copy_(shard(whole_bias));
    } else {
      rms = syncnorm::TensorParallelRMSNorm(
          syncnorm::TensorParallelRMSNormOptions(input.hidden).eps(input.eps()).name("rms"));
      rms->to(input.dtype);
      weight = rms->weight.copy_(shard(whole_weight));
    }
  }
};

torch::Tensor by_hand(const Rows& r) {
  const auto square = (r.x * r.x).sum(-1, true);
  const double hidden = static_cast<double>(r.input.hidden);
  if (!r.input.layer()) {
    const auto mean_square = bench::SumOverRanks::apply(square) / hidden;
    return r.x * (mean_square + r.input.eps()).rsqrt() * r.weight;
  }
  const auto both =
      bench::SumOverRanks::apply(torch::cat({r.x.sum(-1, true), square}, -1)) / hidden;
  const auto mean = both.narrow(-1, 0, 1);
  const auto variance = both.narrow(-1, 1, 1) - mean * mean;
  return (r.x - mean) * (variance + r.input.eps()).rsqrt() * r.weight + r.bias;
}

/// The parameters are whole on every rank, where only this rank's columns of them get a gradient.
torch::Tensor gather(const Rows& r) {
  const auto whole =
      syncnorm::gather_columns(r.x, r.input.shards(), bench::world(), "gather").contiguous();
  return aten(whole, r.input, r.whole_weight, r.whole_bias).narrow(-1, r.start, r.own);
}

std::shared_ptr<bench::StreamingRowNorm> streaming_of(const Rows& r) {
  const auto pointer = [](const torch::Tensor& tensor) {
    return tensor.defined() ? tensor.data_ptr<float>() : nullptr;
  };
  return std::make_shared<bench::StreamingRowNorm>(
      r.input.layer(), static_cast<int>(r.input.rows), static_cast<int>(r.own),
      static_cast<int>(r.input.hidden), pointer(r.x), pointer(r.dy), pointer(r.weight),
      pointer(r.bias), r.input.eps());
}

bench::Tensors results_of(const bench::StreamingRowNorm& loop, const Rows& r) {
  bench::Tensors all{bench::copy_of(loop.y(), r.x.sizes()), bench::copy_of(loop.dx(), r.x.sizes()),
                     bench::copy_of(loop.dweight(), {r.own})};
  if (r.input.layer()) all.push_back(bench::copy_of(loop.dbias(), {r.own}));
  return all;
}

/// Adds what computes in float.
void add_float_calls(bench::Calls& calls, const std::shared_ptr<Rows>& r,
                     const bench::Tensors& expected) {
  const auto loop = streaming_of(*r);
  loop->run();
  bench::compare(results_of(*loop, *r), expected, 1e-3, "streaming loop");
  bench::compare(r->results({by_hand(*r)}), expected, 1e-3, "composition by hand");
  calls["streaming"] = [loop] { loop->run(); };
  const auto bias = r->bias.defined() ? r->bias : torch::empty({0});
  const auto in_graph = [=] {
    return bench::Tensors{
        bench::InGraph<bench::StreamingRowNorm>::apply(r->x, r->weight, bias, loop.get())};
  };
  bench::compare(r->results(in_graph()), expected, 1e-3, "streaming loop in a graph");
  calls["in_graph"] = [=] { r->step(in_graph()); };
  calls["by_hand"] = [r] { r->step({by_hand(*r)}); };
  auto whole = *r;
  whole.leaves = {r->x, r->whole_weight};
  if (r->input.layer()) whole.leaves.push_back(r->whole_bias);
  auto gathered = whole.results({gather(*r)});
  for (size_t i = 2; i < gathered.size(); ++i)
    gathered[i] = gathered[i].narrow(0, r->start, r->own);
  bench::compare(gathered, expected, 1e-3, "gather, then norm");
  calls["gather"] = [whole]() mutable { whole.step({gather(whole)}); };
  const auto triad = std::make_shared<bench::Triad>(static_cast<size_t>(r->x.numel()));
  calls["triad"] = [triad] { triad->run(); };
}

bench::Calls prepare_norm(const Input& input) {
  const auto r = std::make_shared<Rows>(input);
  const auto results = r->results({r->ours()});
  if (bench::world()->size() == 1)
    bench::compare(r->results({aten(r->x, input, r->weight, r->bias)}), results,
                   bench::tolerance_of(input.dtype), "ATen on one rank");
  bench::Calls calls;
  calls["ours"] = [r] { r->step({r->ours()}); };
  calls["aten"] = [r] { r->step({aten(r->x, r->input, r->weight, r->bias)}); };
  if (input.dtype == torch::kFloat) add_float_calls(calls, r, results);
  return calls;
}

void add_norm(const Input& input) {
  bench::Case description;
  description.name = input.name("");
  description.contestants = {{"ours", kPasses}, {"aten", kPasses}};
  if (input.dtype == torch::kFloat)
    for (const auto& each : std::vector<bench::Contestant>{{"streaming", kPasses},
                                                           {"in_graph", kPasses},
                                                           {"triad", 3},
                                                           {"by_hand", kPasses},
                                                           {"gather", kPasses}})
      description.contestants.push_back(each);
  description.bytes = input.bytes();
  description.prepare = [input] { return prepare_norm(input); };
  bench::add_case(std::move(description));
}

bench::Calls prepare_residual(const Input& input) {
  const auto r = std::make_shared<Rows>(input);
  const auto residual = torch::randn_like(r->x.detach()).set_requires_grad(true);
  r->leaves.push_back(residual);
  r->output_gradients.push_back(torch::randn_like(r->dy));
  // The norm of a sum that is not a leaf of its own.
  const auto of_sum = [r](const torch::Tensor& sum) {
    return r->input.layer() ? r->layer->forward(sum) : r->rms->forward(sum);
  };
  const auto ours = [r, residual] {
    const auto [y, sum] = r->ours(residual);
    return bench::Tensors{y, sum};
  };
  const auto apart = [r, residual, of_sum] {
    const auto sum = r->x + residual;
    return bench::Tensors{of_sum(sum), sum};
  };
  const auto aten_apart = [r, residual] {
    const auto sum = r->x + residual;
    return bench::Tensors{aten(sum, r->input, r->weight, r->bias), sum};
  };
  bench::compare(r->results(apart()), r->results(ours()), bench::tolerance_of(input.dtype),
                 "sum, then norm");
  bench::Calls calls;
  calls["ours"] = [r, ours] { r->step(ours()); };
  calls["apart"] = [r, apart] { r->step(apart()); };
  calls["aten"] = [r, aten_apart] { r->step(aten_apart()); };
  return calls;
}

void add_residual(const Input& input) {
  // Forward x, residual and sum, sum and y; backward the norm's five and the sum's own gradient.
  constexpr double passes = 11;
  bench::Case description;
  description.name = input.name("_residual");
  description.contestants = {{"ours", passes}, {"apart", passes}, {"aten", passes}};
  description.bytes = input.bytes();
  description.prepare = [input] { return prepare_residual(input); };
  bench::add_case(std::move(description));
}

bench::Calls prepare_linear(const Input& input) {
  const auto fused = syncnorm::NormColumnParallelLinear(
                         syncnorm::NormColumnParallelLinearOptions(input.hidden, input.hidden)
                             .norm(input.kind)
                             .name("norm_linear"))
                         .ptr();
  const auto x =
      torch::randn({input.rows, input.shards()[static_cast<size_t>(bench::world()->rank())]})
          .set_requires_grad(true);
  const auto p = std::make_shared<bench::Problem>();
  p->leaves = fused->parameters();
  p->leaves.push_back(x);
  const auto ours = [fused, x] { return bench::Tensors{fused->forward(x)}; };
  const auto apart = [fused, x, layer = input.layer()] {
    return bench::Tensors{fused->linear->forward(layer ? fused->layer_norm->forward(x)
                                                       : fused->rms_norm->forward(x))};
  };
  const auto alone = [fused, x] { return bench::Tensors{fused->linear->forward(x)}; };
  p->output_gradients = {torch::randn_like(ours()[0])};
  bench::compare(p->results(apart()), p->results(ours()), 1e-3, "norm, then linear");
  bench::Calls calls;
  calls["ours"] = [p, ours] { p->step(ours()); };
  calls["apart"] = [p, apart] { p->step(apart()); };
  calls["linear_alone"] = [p, alone] { p->step(alone()); };
  return calls;
}

void add_linear(const Input& input) {
  bench::Case description;
  description.name = input.name("_linear");
  description.contestants = {{"ours"}, {"apart"}, {"linear_alone"}};
  description.bytes = input.bytes();
  description.prepare = [input] { return prepare_linear(input); };
  bench::add_case(std::move(description));
}

void add_cases() {
  for (const auto kind : {NormKind::layer, NormKind::rms}) {
    for (const auto& [rows, hidden] : std::vector<std::pair<int64_t, int64_t>>{
             {1, 8192}, {32, 8192}, {512, 4096}, {2048, 1024}, {2048, 4096}})
      add_norm({kind, rows, hidden});
    for (const auto dtype : {torch::kDouble, torch::kBFloat16, torch::kHalf})
      add_norm({kind, 512, 4096, dtype});
    for (const int64_t rows : {1, 512}) add_residual({kind, rows, 4096});
    for (const int64_t rows : {1, 512}) add_linear({kind, rows, 1024});
  }
}

}  // namespace

int main(int argc, char** argv) { return bench::run_benchmarks(argc, argv, add_cases); }
