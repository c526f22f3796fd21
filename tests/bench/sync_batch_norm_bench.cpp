// Forward and backward of SyncBatchNorm beside
//   aten       ATen's own batch norm of each rank's batch alone: no communication, another result
//   streaming  plain loops over contiguous floats with the same two all-reduces, no framework
//   in_graph   that loop as a node of autograd's graph: the least that LibTorch adds
//   by_hand    the recipe of means and mean squares in tensor operations
//   triad      z = x + s*y over arrays of the same size: what memory gives
// then the forms with ReLU, and with a residual before it, beside norm, sum and ReLU apart.
// launch/run -n 2 bench_sync_batch_norm_bench [--benchmark_filter=REGEX] [--benchmark_out=FILE]
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "harness.h"
#include "recipes.h"
#include "streaming.h"
#include "syncnorm/syncnorm.h"

namespace {

namespace bench = syncnorm::bench;

constexpr double kEps = 1e-5;
// x for the sums, x and y to apply; x and dy for the sums, x, dy and dx to apply.
constexpr double kPasses = 8;

struct Input {
  std::vector<int64_t> shape;
  torch::MemoryFormat format;
  torch::Dtype dtype;
};

struct Batch : bench::Problem {
  explicit Batch(const Input& input) {
    torch::manual_seed(bench::world()->rank());
    const int64_t channels = input.shape[1];
    const auto make = [&] {
      return torch::randn(input.shape).to(input.dtype).contiguous(input.format);
    };
    x = make().set_requires_grad(true);
    dy = make();
    // Parameters of half and bfloat16 layers are kept in float, as mixed precision does.
    const auto dtype = input.dtype == torch::kDouble ? torch::kDouble : torch::kFloat;
    norm = syncnorm::SyncBatchNorm(
        syncnorm::SyncBatchNormOptions(channels).eps(kEps).name("benchmark"));
    norm->to(dtype);
    torch::NoGradGuard no_grad;
    weight = norm->weight.copy_(1 + 0.1 * torch::linspace(-1, 1, channels));
    bias = norm->bias.copy_(0.1 * torch::linspace(1, -1, channels));
    running_mean = torch::zeros({channels}, dtype);
    running_var = torch::ones({channels}, dtype);
    leaves = {x, weight, bias};
    output_gradients = {dy};
  }

  torch::Tensor x, dy, weight, bias, running_mean, running_var;
  syncnorm::SyncBatchNorm norm = nullptr;  // its parameters are weight and bias
};

/// Over equal batches.
torch::Tensor by_hand(const Batch& b) {
  const std::vector<int64_t> dims{0, 2, 3};
  const int64_t channels = b.x.size(1);
  const auto local = torch::cat({b.x.mean(dims), (b.x * b.x).mean(dims)});
  const auto both = bench::SumOverRanks::apply(local) / bench::world()->size();
  const auto mean = both.narrow(0, 0, channels);
  const auto variance = both.narrow(0, channels, channels) - mean * mean;
  const auto scale = b.weight * (variance + kEps).rsqrt();
  const auto shift = b.bias - mean * scale;
  return b.x * scale.view({1, -1, 1, 1}) + shift.view({1, -1, 1, 1});
}

torch::Tensor aten(const Batch& b) {
  return torch::batch_norm(b.x, b.weight, b.bias, b.running_mean, b.running_var, true, 0.1, kEps,
                           false);
}

std::shared_ptr<bench::StreamingBatchNorm> streaming_of(const Batch& b) {
  const auto pointer = [](const torch::Tensor& tensor) { return tensor.data_ptr<float>(); };
  const auto x = b.x.detach().contiguous(), dy = b.dy.contiguous();
  const auto& s = b.x.sizes();
  return std::make_shared<bench::StreamingBatchNorm>(
      static_cast<int>(s[0]), static_cast<int>(s[1]), static_cast<int>(s[2] * s[3]), pointer(x),
      pointer(dy), pointer(b.weight), pointer(b.bias), kEps);
}

bench::Tensors results_of(const bench::StreamingBatchNorm& loop, const Batch& b) {
  return {bench::copy_of(loop.y(), b.x.sizes()), bench::copy_of(loop.dx(), b.x.sizes()),
          bench::copy_of(loop.dweight(), b.weight.sizes()),
          bench::copy_of(loop.dbias(), b.bias.sizes())};
}

/// Adds the loop, the recipe and the triad, which compute in float.
void add_float_calls(bench::Calls& calls, const std::shared_ptr<Batch>& b,
                     const bench::Tensors& expected) {
  const auto loop = streaming_of(*b);
  loop->run();
  bench::compare(results_of(*loop, *b), expected, 1e-3, "streaming loop");
  bench::compare(b->results({by_hand(*b)}), expected, 1e-3, "composition by hand");
  calls["streaming"] = [loop] { loop->run(); };
  const auto contiguous = std::make_shared<bench::Problem>();
  const auto x = b->x.detach().contiguous().set_requires_grad(true);
  contiguous->leaves = {x, b->weight, b->bias};
  contiguous->output_gradients = {b->dy.contiguous()};
  const auto in_graph = [=] {
    return bench::Tensors{
        bench::InGraph<bench::StreamingBatchNorm>::apply(x, b->weight, b->bias, loop.get())};
  };
  bench::compare(contiguous->results(in_graph()), expected, 1e-3, "streaming loop in a graph");
  calls["in_graph"] = [=] { contiguous->step(in_graph()); };
  calls["by_hand"] = [b] { b->step({by_hand(*b)}); };
  const auto triad = std::make_shared<bench::Triad>(static_cast<size_t>(b->x.numel()));
  calls["triad"] = [triad] { triad->run(); };
}

bench::Calls prepare(const Input& input) {
  const auto b = std::make_shared<Batch>(input);
  const auto results = b->results({b->norm->forward(b->x)});
  if (bench::world()->size() == 1)
    bench::compare(b->results({aten(*b)}), results, bench::tolerance_of(input.dtype),
                   "ATen on one rank");
  bench::Calls calls;
  calls["ours"] = [b] { b->step({b->norm->forward(b->x)}); };
  calls["aten"] = [b] { b->step({aten(*b)}); };
  if (input.dtype == torch::kFloat) add_float_calls(calls, b, results);
  return calls;
}

std::string name_of(const Input& input, const std::string& form) {
  const bool contiguous = input.format == torch::MemoryFormat::Contiguous;
  return "SyncBatchNorm" + form + "/" + bench::shape_text(input.shape) +
         (contiguous ? "/contiguous/" : "/channels_last/") + c10::toString(input.dtype);
}

int64_t bytes_of(const Input& input) {
  return static_cast<int64_t>(c10::elementSize(input.dtype)) * c10::multiply_integers(input.shape);
}

void add(const Input& input) {
  bench::Case description;
  description.name = name_of(input, "");
  description.contestants = {{"ours", kPasses}, {"aten", kPasses}};
  if (input.dtype == torch::kFloat)
    for (const auto& each : std::vector<bench::Contestant>{
             {"streaming", kPasses}, {"in_graph", kPasses}, {"triad", 3}, {"by_hand", kPasses}})
      description.contestants.push_back(each);
  description.bytes = bytes_of(input);
  description.prepare = [input] { return prepare(input); };
  bench::add_case(std::move(description));
}

/// ReLU of the norm, or of norm and residual.
bench::Calls prepare_relu(const Input& input, bool with_residual) {
  const auto b = std::make_shared<Batch>(input);
  torch::Tensor residual;
  if (with_residual) {
    residual = torch::randn_like(b->x.detach()).set_requires_grad(true);
    b->leaves.push_back(residual);
  }
  const auto relu_of = [residual](const torch::Tensor& y) {
    return bench::Tensors{torch::relu(residual.defined() ? y + residual : y)};
  };
  const auto ours = [b, residual] {
    b->norm->options.relu(true);
    return bench::Tensors{b->norm->forward(b->x, residual)};
  };
  const auto apart = [b, relu_of] {
    b->norm->options.relu(false);
    return relu_of(b->norm->forward(b->x));
  };
  const auto local = [b, relu_of] { return relu_of(aten(*b)); };
  bench::compare_norms(b->results(ours()), b->results(apart()), 5e-3, "norm, sum and ReLU apart");
  return {{"ours", [b, ours] { b->step(ours()); }},
          {"apart", [b, apart] { b->step(apart()); }},
          {"aten", [b, local] { b->step(local()); }}};
}

void add_relu(const Input& input, bool with_residual) {
  // With a residual: x, x, residual, y; the mask, x, dy, mask, x, dy, dx and the residual's own.
  const double passes = with_residual ? 12 : kPasses;
  bench::Case description;
  description.name = name_of(input, with_residual ? "_add_relu" : "_relu");
  description.contestants = {{"ours", passes}, {"apart", passes}, {"aten", passes}};
  description.bytes = bytes_of(input);
  description.prepare = [=] { return prepare_relu(input, with_residual); };
  bench::add_case(std::move(description));
}

void add_cases() {
  const std::vector<std::vector<int64_t>> shapes{
      {2, 64, 7, 7},    {2, 64, 56, 56},   {2, 256, 28, 28}, {2, 1024, 14, 14},
      {2, 256, 56, 56}, {16, 128, 28, 28}, {2, 64, 200, 304}};
  for (const auto format : {torch::MemoryFormat::Contiguous, torch::MemoryFormat::ChannelsLast}) {
    for (const auto& shape : shapes) add({shape, format, torch::kFloat});
    for (const auto dtype : {torch::kDouble, torch::kBFloat16, torch::kHalf})
      add({{2, 256, 28, 28}, format, dtype});
    for (const auto& shape : {shapes[2], shapes[4]})
      for (const bool with_residual : {false, true})
        add_relu({shape, format, torch::kFloat}, with_residual);
  }
}

}  // namespace

int main(int argc, char** argv) { return bench::run_benchmarks(argc, argv, add_cases); }
