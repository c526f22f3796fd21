// What a second thread brings: norms on one rank with 1 and 2 threads, ours and ATen's local ones.
// The column "first / this" is the speed-up over ours on one thread.
// launch/run -n 1 bench_threads
#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "harness.h"
#include "recipes.h"
#include "syncnorm/syncnorm.h"

namespace {

namespace bench = syncnorm::bench;

using Norm = std::function<torch::Tensor(const torch::Tensor&)>;

struct Pair {
  Norm ours, aten;
  bench::Tensors parameters;
};

Pair batch_norm(int64_t channels) {
  syncnorm::SyncBatchNorm norm(syncnorm::SyncBatchNormOptions(channels).name("batch"));
  torch::nn::BatchNorm2d plain(channels);
  auto parameters = norm->parameters();
  for (const auto& parameter : plain->parameters()) parameters.push_back(parameter);
  return {[norm](const torch::Tensor& x) mutable { return norm->forward(x); },
          [plain](const torch::Tensor& x) mutable { return plain->forward(x); }, parameters};
}

Pair layer_norm(int64_t hidden) {
  syncnorm::TensorParallelLayerNorm norm(
      syncnorm::TensorParallelLayerNormOptions(hidden).name("layer"));
  torch::nn::LayerNorm plain(torch::nn::LayerNormOptions({norm->weight.numel()}));
  auto parameters = norm->parameters();
  for (const auto& parameter : plain->parameters()) parameters.push_back(parameter);
  return {[norm](const torch::Tensor& x) mutable { return norm->forward(x); },
          [plain](const torch::Tensor& x) mutable { return plain->forward(x); }, parameters};
}

Pair rms_norm(int64_t hidden) {
  syncnorm::TensorParallelRMSNorm norm(syncnorm::TensorParallelRMSNormOptions(hidden).name("rms"));
  const auto weight = torch::ones_like(norm->weight.detach()).set_requires_grad(true);
  return {[norm](const torch::Tensor& x) mutable { return norm->forward(x); },
          [weight](const torch::Tensor& x) { return at::rms_norm(x, {x.size(-1)}, weight, 1e-6); },
          {norm->weight, weight}};
}

using Shape = std::vector<int64_t>;

/// A rank's part of the input: whole batches, columns of rows.
Shape part_of(Shape shape, int rank) {
  if (shape.size() == 2)
    shape[1] =
        syncnorm::balanced_shards(shape[1], bench::world()->size())[static_cast<size_t>(rank)];
  return shape;
}

bench::Calls prepare(const Shape& shape, torch::MemoryFormat format, const Pair& pair) {
  const auto part = part_of(shape, bench::world()->rank());
  const auto x = torch::randn(part).contiguous(format).set_requires_grad(true);
  const auto p = std::make_shared<bench::Problem>();
  p->leaves = pair.parameters;
  p->leaves.push_back(x);
  p->output_gradients = {torch::randn(part).contiguous(format)};
  at::set_num_threads(2);
  const auto with_two = pair.ours(x).detach();
  at::set_num_threads(1);
  bench::expect_close(with_two, pair.ours(x).detach(), 1e-6, "two threads and one");
  const auto ours = [p, x, pair] { p->step({pair.ours(x)}); };
  const auto aten = [p, x, pair] { p->step({pair.aten(x)}); };
  return {{"ours_1_thread", ours},
          {"ours_2_threads", ours},
          {"aten_1_thread", aten},
          {"aten_2_threads", aten}};
}

void add(const std::string& name, const Shape& shape, torch::MemoryFormat format,
         const std::function<Pair(int64_t)>& make) {
  bench::Case description;
  description.name =
      name + "/" + bench::shape_text(shape) +
      (format == torch::MemoryFormat::Contiguous ? "/contiguous" : "/channels_last") + "/Float";
  description.contestants = {
      {"ours_1_thread", 8}, {"ours_2_threads", 8}, {"aten_1_thread", 8}, {"aten_2_threads", 8}};
  description.bytes = 4 * c10::multiply_integers(part_of(shape, 0));
  description.before = [](const std::string& contestant) {
    at::set_num_threads(contestant.find("_2_") == std::string::npos ? 1 : 2);
  };
  description.prepare = [=] { return prepare(shape, format, make(shape[1])); };
  bench::add_case(std::move(description));
}

void add_cases() {
  for (const auto format : {torch::MemoryFormat::Contiguous, torch::MemoryFormat::ChannelsLast})
    for (const auto& shape :
         std::vector<Shape>{{2, 256, 28, 28}, {2, 256, 56, 56}, {2, 64, 200, 304}})
      add("SyncBatchNorm", shape, format, batch_norm);
  for (const auto& shape : std::vector<Shape>{{32, 8192}, {512, 4096}}) {
    add("LayerNorm", shape, torch::MemoryFormat::Contiguous, layer_norm);
    add("RMSNorm", shape, torch::MemoryFormat::Contiguous, rms_norm);
  }
}

}  // namespace

int main(int argc, char** argv) { return bench::run_benchmarks(argc, argv, add_cases); }
