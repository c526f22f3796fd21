// Forward and backward of SyncBatchNorm against two baselines in the same run: ATen's own batch
// norm on each rank's batch alone (no communication, so a bound that is hard to beat), and the
// composition of tensor operations with which people synchronise by hand. Prints the median time of
// each and the ratios; checks first that the results are the same.
//   mpirun -n 2 bench_sync_batch_norm_bench
#include <torch/torch.h>

#include <cstdio>
#include <thread>
#include <vector>

#include "syncnorm/syncnorm.h"
#include "timing.h"

namespace {

using syncnorm::bench::median_us;
using syncnorm::bench::processor;

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

/// Mean and mean square over equal batches, the well-known recipe in plain tensor operations.
torch::Tensor by_hand(const torch::Tensor& x, const torch::Tensor& weight,
                      const torch::Tensor& bias, int ranks) {
  const std::vector<int64_t> dims{0, 2, 3};
  const auto both = SumOverRanks::apply(torch::cat({x.mean(dims), (x * x).mean(dims)})) / ranks;
  const auto mean = both.narrow(0, 0, x.size(1));
  const auto variance = both.narrow(0, x.size(1), x.size(1)) - mean * mean;
  const auto scale = weight * (variance + 1e-5).rsqrt();
  const auto shift = bias - mean * scale;
  return x * scale.view({1, -1, 1, 1}) + shift.view({1, -1, 1, 1});
}

void run(const std::vector<int64_t>& shape, torch::MemoryFormat format, bool lead) {
  const auto& comm = syncnorm::Environment::current()->world();
  torch::manual_seed(comm->rank());
  const auto x = torch::randn(shape).contiguous(format).set_requires_grad(true);
  const auto dy = torch::randn(shape).contiguous(format);
  syncnorm::SyncBatchNorm norm(shape[1]);
  auto weight = torch::ones({shape[1]}).set_requires_grad(true);
  auto bias = torch::zeros({shape[1]}).set_requires_grad(true);
  const auto running_mean = torch::zeros({shape[1]});
  const auto running_var = torch::ones({shape[1]});
  const auto clear = [&] { x.mutable_grad() = torch::Tensor(); };

  norm->forward(x).backward(dy);
  const auto ours = x.grad().clone();
  clear();
  by_hand(x, weight, bias, comm->size()).backward(dy);
  TORCH_CHECK(torch::allclose(ours, x.grad(), 1e-3, 1e-4),
              "the results differ, so there is nothing to time");
  clear();

  const int repetitions = x.numel() > 4'000'000 ? 9 : 25;
  const double local = median_us(*comm, repetitions, [&] {
    torch::batch_norm(x, weight, bias, running_mean, running_var, true, 0.1, 1e-5, false)
        .backward(dy);
    clear();
  });
  const double hand = median_us(*comm, repetitions, [&] {
    by_hand(x, weight, bias, comm->size()).backward(dy);
    clear();
  });
  const double sync = median_us(*comm, repetitions, [&] {
    norm->forward(x).backward(dy);
    clear();
  });
  if (!lead) return;
  std::printf(
      "%4ld x %4ld x %3ld x %3ld %-13s %9.0f us | ATen, one rank's batch %9.0f us, ratio %5.2f | "
      "by hand %9.0f us, ratio %5.2f\n",
      static_cast<long>(shape[0]), static_cast<long>(shape[1]), static_cast<long>(shape[2]),
      static_cast<long>(shape[3]),
      format == torch::MemoryFormat::Contiguous ? "contiguous" : "channels-last", sync, local,
      sync / local, hand, sync / hand);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  syncnorm::Environment environment(argc, argv);
  const bool lead = environment.world()->rank() == 0;
  if (lead)
    std::printf(
        "SyncBatchNorm forward + backward, float, %d ranks, %d threads each, %s, %u cores\n",
        environment.world()->size(), at::get_num_threads(), processor().c_str(),
        std::thread::hardware_concurrency());
  for (const auto& shape : std::vector<std::vector<int64_t>>{{2, 64, 56, 56},
                                                             {2, 256, 56, 56},
                                                             {2, 256, 28, 28},
                                                             {2, 1024, 14, 14},
                                                             {2, 64, 200, 304},
                                                             {16, 128, 28, 28}})
    for (const auto format : {torch::MemoryFormat::Contiguous, torch::MemoryFormat::ChannelsLast})
      run(shape, format, lead);
}
