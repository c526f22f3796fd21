// Forward and backward of SyncBatchNorm beside
//   aten       ATen's own batch norm of each rank's batch alone: no communication, another result
//   streaming  plain loops over contiguous floats with the same two all-reduces, no framework
//   by_hand    the recipe of means and mean squares in tensor operations
//   triad      z = x + s*y over arrays of the same size: what memory gives
// launch/run -n 2 bench_sync_batch_norm_bench [--benchmark_filter=REGEX] [--benchmark_out=FILE]
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "harness.h"
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

struct Tensors {
  explicit Tensors(const Input& input) {
    torch::manual_seed(syncnorm::Environment::current()->world()->rank());
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
  }

  /// Backward with dy; frees the gradients.
  void backward(const torch::Tensor& y) {
    y.backward(dy);
    clear();
  }

  /// y, dx, dweight, dbias.
  std::vector<torch::Tensor> results(const torch::Tensor& y) {
    y.backward(dy);
    std::vector<torch::Tensor> all{y.detach(), x.grad(), weight.grad(), bias.grad()};
    clear();
    return all;
  }

  void clear() {
    for (auto* tensor : {&x, &weight, &bias}) tensor->mutable_grad() = torch::Tensor();
  }

  torch::Tensor x, dy, weight, bias, running_mean, running_var;
  syncnorm::SyncBatchNorm norm = nullptr;  // its parameters are weight and bias
};

/// Sum over ranks in forward, and of gradients in backward.
struct SumOverRanks : torch::autograd::Function<SumOverRanks> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& local) {
    auto sum = local.clone();
    syncnorm::Environment::current()->world()->all_reduce(sum);
    return sum;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    auto sum = gradients[0].clone();
    syncnorm::Environment::current()->world()->all_reduce(sum);
    return {sum};
  }
};

/// Over equal batches.
torch::Tensor by_hand(const Tensors& t) {
  const std::vector<int64_t> dims{0, 2, 3};
  const int64_t channels = t.x.size(1);
  const int ranks = syncnorm::Environment::current()->world()->size();
  const auto local = torch::cat({t.x.mean(dims), (t.x * t.x).mean(dims)});
  const auto both = SumOverRanks::apply(local) / ranks;
  const auto mean = both.narrow(0, 0, channels);
  const auto variance = both.narrow(0, channels, channels) - mean * mean;
  const auto scale = t.weight * (variance + kEps).rsqrt();
  const auto shift = t.bias - mean * scale;
  return t.x * scale.view({1, -1, 1, 1}) + shift.view({1, -1, 1, 1});
}

torch::Tensor aten(const Tensors& t) {
  return torch::batch_norm(t.x, t.weight, t.bias, t.running_mean, t.running_var, true, 0.1, kEps,
                           false);
}

void compare(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b,
             double tolerance, const std::string& what) {
  const char* const names[] = {", y", ", dx", ", dweight", ", dbias"};
  for (size_t i = 0; i < a.size(); ++i) bench::expect_close(a[i], b[i], tolerance, what + names[i]);
}

std::shared_ptr<bench::StreamingBatchNorm> streaming_of(const Tensors& t) {
  const auto pointer = [](const torch::Tensor& tensor) { return tensor.data_ptr<float>(); };
  const auto x = t.x.detach().contiguous(), dy = t.dy.contiguous();
  const auto& s = t.x.sizes();
  return std::make_shared<bench::StreamingBatchNorm>(
      static_cast<int>(s[0]), static_cast<int>(s[1]), static_cast<int>(s[2] * s[3]), pointer(x),
      pointer(dy), pointer(t.weight), pointer(t.bias), kEps);
}

std::vector<torch::Tensor> results_of(const bench::StreamingBatchNorm& loop, const Tensors& t) {
  const auto copy = [](const float* from, torch::IntArrayRef shape) {
    return torch::from_blob(const_cast<float*>(from), shape).clone();
  };
  return {copy(loop.y(), t.x.sizes()), copy(loop.dx(), t.x.sizes()),
          copy(loop.dweight(), t.weight.sizes()), copy(loop.dbias(), t.bias.sizes())};
}

/// Adds the loop, the recipe and the triad, which compute in float.
void add_float_calls(bench::Calls& calls, const std::shared_ptr<Tensors>& t,
                     const std::vector<torch::Tensor>& expected) {
  const auto loop = streaming_of(*t);
  loop->run();
  compare(results_of(*loop, *t), expected, 1e-3, "streaming loop");
  compare(t->results(by_hand(*t)), expected, 1e-3, "composition by hand");
  calls["streaming"] = [loop] { loop->run(); };
  calls["by_hand"] = [t] { t->backward(by_hand(*t)); };
  const auto triad = std::make_shared<bench::Triad>(static_cast<size_t>(t->x.numel()));
  calls["triad"] = [triad] { triad->run(); };
}

bench::Calls prepare(const Input& input) {
  const auto t = std::make_shared<Tensors>(input);
  const auto results = t->results(t->norm->forward(t->x));
  bench::Calls calls;
  calls["ours"] = [t] { t->backward(t->norm->forward(t->x)); };
  calls["aten"] = [t] { t->backward(aten(*t)); };
  if (syncnorm::Environment::current()->world()->size() == 1)
    compare(t->results(aten(*t)), results, bench::tolerance_of(input.dtype), "ATen on one rank");
  if (input.dtype == torch::kFloat) add_float_calls(calls, t, results);
  return calls;
}

void add(const Input& input) {
  const bool contiguous = input.format == torch::MemoryFormat::Contiguous;
  bench::Case description;
  description.name = "SyncBatchNorm/" + bench::shape_text(input.shape) +
                     (contiguous ? "/contiguous/" : "/channels_last/") + c10::toString(input.dtype);
  description.contestants = {{"ours", kPasses}, {"aten", kPasses}};
  if (input.dtype == torch::kFloat)
    for (const auto& each :
         std::vector<bench::Contestant>{{"streaming", kPasses}, {"triad", 3}, {"by_hand", kPasses}})
      description.contestants.push_back(each);
  description.bytes =
      static_cast<int64_t>(c10::elementSize(input.dtype)) * c10::multiply_integers(input.shape);
  description.prepare = [input] { return prepare(input); };
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
  }
}

}  // namespace

int main(int argc, char** argv) { return bench::run_benchmarks(argc, argv, add_cases); }
