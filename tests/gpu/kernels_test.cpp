// The CUDA kernels on a device against the plain ones there: the cases of the CPU's kernels, and
// what only a device has. Every rank for itself.
#include "kernels/kernels.h"

#include <c10/cuda/CUDAGuard.h>

#include "gpu/gpu_test.h"
#include "kernels/cuda/launch.h"
#include "kernels/deferred.h"
#include "support/kernel_checks.h"

namespace syncnorm::kernels {
namespace {

using syncnorm::testing::OnGpu;
using testing::Case;
using testing::Data;
using testing::relative_difference;

class GpuKernels : public OnGpu<::testing::TestWithParam<Case>> {
 protected:
  void compare(void (*check)(const KernelSet& set, const Data& data)) {
    testing::for_every_dtype(GetParam(), device,
                             [&](const Data& data) { check(*cuda_kernels(), data); });
  }
};

TEST_P(GpuKernels, Moments) { compare(testing::check_moments); }
TEST_P(GpuKernels, MomentsOfASum) { compare(testing::check_moments_of_a_sum); }
TEST_P(GpuKernels, Apply) { compare(testing::check_apply); }
TEST_P(GpuKernels, Backward) { compare(testing::check_backward); }

/// `tensor` one element off the alignment that an allocation has.
at::Tensor misaligned(const at::Tensor& tensor) {
  const auto room = at::empty({tensor.numel() + 1}, tensor.options());
  const auto result =
      room.narrow(0, 1, tensor.numel()).as_strided(tensor.sizes(), tensor.strides());
  return result.copy_(tensor);
}

TEST_P(GpuKernels, TakeAnyAlignment) {
  compare([](const KernelSet& set, const Data& data) {
    auto moved = data;
    if (data.x.numel() > 0)
      for (auto* tensor : {&moved.x, &moved.dy, &moved.residual}) *tensor = misaligned(*tensor);
    testing::check_moments(set, moved);
    testing::check_apply(set, moved);
    testing::check_backward(set, moved);
  });
}

INSTANTIATE_TEST_SUITE_P(ByCell, GpuKernels, ::testing::ValuesIn(testing::cases_by_cell()));
INSTANTIATE_TEST_SUITE_P(ByColumn, GpuKernels, ::testing::ValuesIn(testing::cases_by_column()));

class GpuKernelSet : public OnGpu<> {
 protected:
  const KernelSet& set = *cuda_kernels();
  const DeferredKernels& deferred = *cuda_kernels()->deferred();

  at::Tensor all_sums(const Data& data) const {
    const auto norm = data.norm();
    auto moments = at::empty_like(data.sums), slots = at::empty_like(data.sums);
    auto affine = at::empty(data.layout.affine_shape(), data.sums.options());
    set.moments(norm.input, data.layout, {}, moments);
    set.backward_sums(norm, norm.input.match(data.dy), slots, affine);
    return at::cat({moments.flatten(), slots.flatten(), affine.flatten()});
  }

  Outcome outcome(double tag, double sum_of_tags, double ranks) const {
    Outcome result;
    result.verdict = at::zeros({1}, at::TensorOptions().dtype(at::kInt).pinned_memory(true));
    result.tags = at::tensor({sum_of_tags, sum_of_tags * tag}, at::kDouble).to(device);
    result.tag = tag;
    result.ranks = ranks;
    return result;
  }
  int32_t read(const Outcome& outcome) const {
    c10::cuda::device_synchronize();
    return outcome.verdict.item<int32_t>();
  }
};

/// Blocks finish in any order, and other work is beside them.
TEST_F(GpuKernelSet, RepeatsItsBitsOnEveryStream) {
  for (const auto& c : {Case{{9000, 37, 1}}, Case{{3, 37, 3000}}, Case{{1, 2, 3000000}},
                        Case{{64, 64, 784}, 0, true}, Case{{1, 2000, 300}, 1}}) {
    const Data data(c, at::kFloat, true, device);
    const auto expected = all_sums(data);
    c10::cuda::device_synchronize();
    std::vector<at::Tensor> results;
    for (int i = 0; i < 8; ++i) {
      const auto stream = c10::cuda::getStreamFromPool(i % 2 == 0, device.index());
      const c10::cuda::CUDAStreamGuard guard(stream);
      for (int repeat = 0; repeat < 4; ++repeat) results.push_back(all_sums(data));
    }
    c10::cuda::device_synchronize();
    for (const auto& result : results) EXPECT_TRUE(at::equal(result, expected)) << c.cells.outer;
  }
}

/// Slots that are unions of cells, and cells that another rank counts.
TEST_F(GpuKernelSet, GroupsOfChannels) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
    for (const int64_t space : {1, 49, 3000}) {
      SCOPED_TRACE(::testing::Message() << dtype << ' ' << space);
      torch::manual_seed(space);
      const auto x = at::randn({5, 12, space}, dtype).to(device) + 2;
      auto layout = group_layout(x, {0, 0, 1, 1, 1, 3, 0, 3, 3, 3, 1, 0}, 4);
      layout.count.all = 4.0 * static_cast<double>(space);
      layout.share = (at::arange(60, at::kDouble) % 3 > 0).to(device, at::kDouble);
      const NormInput input(x, layout);
      auto ours = at::empty({2, layout.slots}, x.options().dtype(at::kDouble));
      auto plain = at::empty_like(ours);
      set.moments(input, layout, {}, ours);
      reference_kernels().moments(input, layout, {}, plain);
      EXPECT_LT(relative_difference(ours, plain), testing::sum_tolerance(dtype));

      const auto statistics = at::rand({kStatisticsRows, layout.slots}, ours.options()) + 0.5;
      const auto weight = at::randn({12}, x.options()), bias = at::randn({12}, x.options());
      const Norm norm{input, layout, statistics, weight, bias, {}, false, {}};
      const auto dy = at::randn_like(x);
      auto affine = at::empty(layout.affine_shape(), ours.options());
      auto plain_affine = at::empty_like(affine);
      set.backward_sums(norm, dy, ours, affine);
      reference_kernels().backward_sums(norm, dy, plain, plain_affine);
      EXPECT_LT(relative_difference(ours, plain), testing::sum_tolerance(dtype));
      EXPECT_LT(relative_difference(affine, plain_affine), testing::sum_tolerance(dtype));
      const BackwardOutputs to{input.empty_like(), {}, {}}, plain_to{input.empty_like(), {}, {}};
      set.backward_apply(norm, dy, plain, layout.count, to);
      reference_kernels().backward_apply(norm, dy, plain, layout.count, plain_to);
      EXPECT_LT(relative_difference(to.dx, plain_to.dx), testing::pass_tolerance(dtype));
    }
}

/// Forward and backward as they run round an exchange that nobody waits for.
TEST_F(GpuKernelSet, DeferredOrderGivesWhatTheHostsDoes) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    SCOPED_TRACE(dtype);
    const Data data({{16, 24, 49}}, dtype, true, device);
    auto norm = data.norm(), plain = norm;
    norm.statistics = at::empty_like(data.statistics);
    plain.statistics = at::empty_like(data.statistics);
    const auto mean = at::full({24}, 2.5, data.weight.options()), var = at::ones_like(mean);
    auto plain_mean = mean.clone(), plain_var = var.clone();

    auto words = at::empty({4 + 2 * 24}, data.sums.options());
    const auto sums = words.narrow(0, 4, 48).view({2, 24});
    const Front front{words, {7, 49, 3}, {}};
    const auto center = deferred.moments(data.x, {}, norm.input, data.layout, mean, sums, front);
    EXPECT_TRUE(at::equal(words.narrow(0, 0, 3).cpu(), at::tensor({7., 49., 3.}, at::kDouble)));
    EXPECT_TRUE(at::equal(center, reference_kernels().center(mean)));
    auto plain_sums = at::empty_like(data.sums);
    reference_kernels().moments(norm.input, data.layout, center, plain_sums);
    EXPECT_LT(relative_difference(sums, plain_sums), testing::sum_tolerance(dtype));

    Arriving arriving;
    arriving.sums = sums;
    arriving.center = center;
    arriving.count = data.layout.count;
    arriving.precision = {1e-5, 1e-5, 0x1p27};
    arriving.running_mean = mean;
    arriving.running_var = var;
    arriving.momentum = 0.1;
    arriving.batches = at::zeros({}, data.sums.options().dtype(at::kLong));
    arriving.outcome = outcome(7, 7, 1);
    const auto y = norm.input.empty_like(), plain_y = norm.input.empty_like();
    deferred.finish_and_apply(norm, arriving, y);
    EXPECT_EQ(read(arriving.outcome), cuda::kFine);
    reference_kernels().finish(sums, data.layout, center, data.layout.count, arriving.precision,
                               plain.statistics);
    reference_kernels().update_running(plain.statistics, 16 * 49, 0.1, plain_mean, plain_var);
    reference_kernels().apply(plain, plain_y);
    EXPECT_LT(relative_difference(norm.statistics, plain.statistics), 1e-13);
    EXPECT_LT(relative_difference(y, plain_y), testing::pass_tolerance(dtype));
    EXPECT_LT(relative_difference(mean, plain_mean), testing::pass_tolerance(dtype));
    EXPECT_LT(relative_difference(var, plain_var), testing::pass_tolerance(dtype));
    EXPECT_EQ(arriving.batches.item<int64_t>(), 1);

    auto slots = at::empty_like(data.sums), plain_slots = at::empty_like(data.sums);
    auto affine = at::empty(data.layout.affine_shape(), data.sums.options());
    const auto dbias = at::empty_like(data.bias), dweight = at::empty_like(data.weight);
    deferred.backward_sums(plain, data.dy, slots, {}, dbias, dweight, {});
    reference_kernels().backward_sums(plain, data.dy, plain_slots, affine);
    EXPECT_LT(relative_difference(slots, plain_slots), testing::sum_tolerance(dtype));
    const double near = testing::sum_tolerance(dtype) + testing::pass_tolerance(dtype);
    EXPECT_LT(relative_difference(dbias, affine[0]), near);
    EXPECT_LT(relative_difference(dweight, affine[1]), near);
    const BackwardOutputs to{norm.input.empty_like(), {}, {}};
    const BackwardOutputs plain_to{norm.input.empty_like(), {}, {}};
    const auto backward = outcome(5, 5, 1);
    deferred.backward_apply(plain, data.dy, slots, data.layout.count, to, backward);
    reference_kernels().backward_apply(plain, data.dy, slots, data.layout.count, plain_to);
    EXPECT_EQ(read(backward), cuda::kFine);
    EXPECT_LT(relative_difference(to.dx, plain_to.dx), testing::pass_tolerance(dtype));
  }
}

/// The other of two ranks sent another tag: no number comes out, and nothing is kept.
TEST_F(GpuKernelSet, DisagreementPoisonsTheOutputAndSparesBuffers) {
  const Data data({{4, 6, 10}}, at::kFloat, true, device);
  auto norm = data.norm();
  norm.statistics = at::empty_like(data.statistics);
  Arriving arriving;
  arriving.sums = data.sums.abs();
  arriving.count = data.layout.count;
  arriving.precision = {1e-5, 1e-5, 0x1p27};
  arriving.running_mean = at::zeros({6}, data.x.options());
  arriving.running_var = at::ones({6}, data.x.options());
  arriving.momentum = 0.1;
  arriving.outcome = outcome(7, 7 + 8, 2);
  const auto y = norm.input.empty_like();
  deferred.finish_and_apply(norm, arriving, y);
  EXPECT_EQ(read(arriving.outcome), cuda::kDisagreement);
  EXPECT_TRUE(y.isnan().all().item<bool>());
  EXPECT_TRUE(at::equal(arriving.running_mean, at::zeros_like(arriving.running_mean)));
  EXPECT_TRUE(at::equal(arriving.running_var, at::ones_like(arriving.running_var)));
}

/// Indices beyond 2^31, where the last element must still count.
TEST_F(GpuKernelSet, MoreElementsThanThirtyTwoBitsCount) {
  constexpr int64_t kInner = int64_t{1} << 30;
  if (Environment::current()->world()->size() > 1) GTEST_SKIP() << "one rank is enough";
  size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  if (free < size_t{20} << 30) GTEST_SKIP() << "needs 20 GiB of free memory";
  NormLayout layout;
  layout.cells = {1, 3, kInner};
  layout.slots = layout.affine_rows = 3;
  layout.count.all = kInner;
  const auto x = at::empty({1, 3, kInner}, at::TensorOptions().dtype(at::kBFloat16).device(device));
  for (int c = 0; c < 3; ++c) x[0][c].fill_(c + 1);
  x[0][2][kInner - 1] = 5;
  const NormInput input(x, layout);
  const auto sums = at::empty({2, 3}, x.options().dtype(at::kDouble));
  set.moments(input, layout, {}, sums);
  const double n = kInner;
  EXPECT_TRUE(
      at::equal(sums.cpu(),
                at::tensor({n, 2 * n, 3 * n + 2, n, 4 * n, 9 * n + 16}, at::kDouble).view({2, 3})));
  auto statistics = at::ones({kStatisticsRows, 3}, sums.options());
  statistics[kMean] = at::tensor({1., 2., 3.}, at::kDouble).to(device);
  const auto y = input.empty_like();
  set.apply({input, layout, statistics, {}, {}, {}, false, {}}, y);
  EXPECT_EQ(y[0][2][kInner - 1].item<float>(), 2);
  y[0][2][kInner - 1] = 0;
  EXPECT_EQ(y.count_nonzero().item<int64_t>(), 0);
}

}  // namespace
}  // namespace syncnorm::kernels
