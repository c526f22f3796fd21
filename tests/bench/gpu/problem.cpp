#include "bench/gpu/problem.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>

namespace syncnorm::bench {
namespace {

constexpr int64_t kChannels = 64, kSide = 56, kHidden = 4096;
constexpr double kEps = 1e-5;
constexpr int64_t kFront = 4;

const kernels::DeferredKernels& ours() { return *kernels::cuda_kernels()->deferred(); }

NormLayout layout_of(const Case& c, const at::Tensor& x) {
  if (c.layout == "rows") return row_layout(x, kHidden, c.norm == "layer_norm");
  auto layout = channel_layout(x);
  layout.count.all = static_cast<double>(x.numel() / kChannels);
  return layout;
}

at::Tensor random(const Case& c, c10::Device device) {
  const auto values = at::randn(c.shape, at::TensorOptions().dtype(at::kFloat).device(device));
  const auto format =
      c.layout == "channels_last" ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  return values.to(c.dtype).contiguous(format);
}

void expect_near(const at::Tensor& got, const at::Tensor& want, double tolerance,
                 const char* what) {
  const auto a = got.to(at::kDouble), b = want.to(at::kDouble);
  const double difference = ((a - b).abs().max() / b.abs().max().clamp_min(1)).item<double>();
  TORCH_CHECK(difference < tolerance, what, " differs from the plain kernels' by ", difference);
}

}  // namespace

std::vector<Case> cases_of(const std::vector<int64_t>& megabytes) {
  std::vector<Case> cases;
  for (const auto& [norm, layout] :
       {std::pair{"batch_norm", "contiguous"}, std::pair{"batch_norm", "channels_last"},
        std::pair{"layer_norm", "rows"}, std::pair{"rms_norm", "rows"}})
    for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16})
      for (const int64_t size : megabytes) {
        Case c{norm, layout, dtype, {1, kChannels, kSide, kSide}};
        if (c.layout == "rows") c.shape = {1, kHidden};
        c.shape[0] = std::max<int64_t>(1, (size * 1000000 + c.bytes() / 2) / c.bytes());
        cases.push_back(c);
      }
  return cases;
}

Problem::Problem(const Case& c, c10::Device device)
    : x_(random(c, device)),
      dy_(random(c, device)),
      layout_(layout_of(c, x_)),
      input_(x_, layout_) {
  y_ = at::empty_like(x_);
  dx_ = at::empty_like(x_);
  const bool rows = layout_.by_column;
  // As mixed precision leaves them: float beside half batches, but rows of one dtype, which is
  // what torch's kernels take.
  const auto parameters = x_.options().dtype(rows ? c.dtype : at::kFloat);
  const std::vector<int64_t> shape{rows ? kHidden : kChannels};
  weight_ = at::rand(shape, parameters) + 0.5;
  dweight_ = at::empty_like(weight_);
  if (c.norm != "rms_norm") {
    bias_ = at::randn(shape, parameters);
    dbias_ = at::empty_like(bias_);
  }
  const auto doubles = x_.options().dtype(at::kDouble);
  const int64_t sums = layout_.sums() * layout_.slots;
  forward_words_ = at::empty({kFront + sums}, doubles);
  backward_words_ = at::empty({kFront + sums}, doubles);
  const auto behind = [&](const at::Tensor& words) {
    return words.narrow(0, kFront, sums).view({layout_.sums(), layout_.slots});
  };
  forward_sums_ = behind(forward_words_);
  backward_sums_ = behind(backward_words_);
  statistics_ = at::empty({kernels::kStatisticsRows, layout_.slots}, doubles);
  if (!rows) {
    running_mean_ = at::zeros({kChannels}, parameters);
    running_var_ = at::ones({kChannels}, parameters);
    batches_ = at::zeros({}, parameters.dtype(at::kLong));
  }
}

kernels::Norm Problem::norm() const {
  return {input_, layout_, statistics_, weight_, bias_, {}, false, {}};
}

void Problem::copy() const {
  const auto stream = c10::cuda::getCurrentCUDAStream(x_.device().index());
  C10_CUDA_CHECK(cudaMemcpyAsync(y_.mutable_data_ptr(), x_.const_data_ptr(), x_.nbytes(),
                                 cudaMemcpyDeviceToDevice, stream.stream()));
}

void Problem::moments() const {
  ours().moments(x_, {}, input_, layout_, running_mean_, forward_sums_,
                 {forward_words_, {1, 1, 1, 1}, {}});
}

void Problem::apply() const {
  kernels::Arriving arriving;
  arriving.sums = forward_sums_;
  arriving.count = layout_.count;
  arriving.precision = {kEps, kEps, 0x1p27};
  // Momentum of zero: the running mean, which moments() sums about, stays.
  arriving.running_mean = running_mean_;
  arriving.running_var = running_var_;
  arriving.batches = batches_;
  ours().finish_and_apply(norm(), arriving, y_);
}

void Problem::backward_sums() const {
  ours().backward_sums(norm(), dy_, backward_sums_, {}, dbias_, dweight_,
                       {backward_words_, {1, 1}, {}});
}

void Problem::backward_apply() const {
  ours().backward_apply(norm(), dy_, backward_sums_, layout_.count, {dx_, {}, {}}, {});
}

void Problem::check() const {
  const auto& plain = kernels::reference_kernels();
  constexpr double kSums = 3e-6;  // lanes of float
  const double near = x_.scalar_type() == at::kFloat ? 0x1p-20 : 0x1p-7;
  moments();
  const auto sums = at::empty_like(forward_sums_);
  plain.moments(input_, layout_, {}, sums);
  expect_near(forward_sums_, sums, kSums, "moments");
  apply();
  const auto statistics = at::empty_like(statistics_), result = at::empty_like(x_);
  plain.finish(sums, layout_, {}, layout_.count, {kEps, kEps, 0x1p27}, statistics);
  expect_near(statistics_, statistics, kSums, "statistics");
  plain.apply(norm(), result);
  expect_near(y_, result, near, "apply");
  backward_sums();
  const auto affine = at::empty(layout_.affine_shape(), sums.options());
  plain.backward_sums(norm(), dy_, sums, affine);
  expect_near(backward_sums_, sums, kSums, "backward sums");
  expect_near(dweight_, affine[1].view_as(dweight_), near + kSums, "dweight");
  if (dbias_.defined()) expect_near(dbias_, affine[0].view_as(dbias_), near + kSums, "dbias");
  backward_apply();
  plain.backward_apply(norm(), dy_, sums, layout_.count, {result, {}, {}});
  expect_near(dx_, result, near, "backward apply");
}

}  // namespace syncnorm::bench
