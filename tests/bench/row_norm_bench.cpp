// Forward and backward of norms over rows split in columns, against two baselines in the same run:
// ATen's own norm of each rank's columns alone (no communication, another result, so a bound that
// is hard to beat), and gathering the rows to normalise them whole. Then norm and linear layer in
// one gather against the two one after the other. Prints the median time of each and the ratios;
// checks first that the results are the same.
//   mpirun -n 2 bench_row_norm_bench
#include <torch/torch.h>

#include <cstdio>
#include <thread>
#include <vector>

#include "syncnorm/syncnorm.h"
#include "timing.h"

namespace {

using syncnorm::bench::median_us;

struct Rows {
  int64_t count, hidden;
};

struct Setting {
  std::shared_ptr<syncnorm::Communicator> comm;
  bool layer;
  Rows rows;
  std::vector<int64_t> shards;
};

torch::Tensor whole_norm(const torch::Tensor& x, bool layer, const torch::Tensor& weight,
                         const torch::Tensor& bias) {
  return layer ? torch::layer_norm(x, {x.size(-1)}, weight, bias, 1e-5)
               : at::rms_norm(x, {x.size(-1)}, weight, 1e-6);
}

torch::Tensor gather_then_norm(const torch::Tensor& x, const Setting& s,
                               const torch::Tensor& weight, const torch::Tensor& bias) {
  const auto whole = syncnorm::gather_columns(x, s.shards, s.comm, "gather").contiguous();
  int64_t start = 0;
  for (int r = 0; r < s.comm->rank(); ++r) start += s.shards[r];
  return whole_norm(whole, s.layer, weight, bias).narrow(-1, start, s.shards[s.comm->rank()]);
}

void print(const char* name, const Setting& s, double ours, const char* first_name, double first,
           const char* second_name, double second) {
  if (s.comm->rank() != 0) return;
  std::printf("%-22s %5ld x %5ld %8.0f us | %s %8.0f us, ratio %5.2f", name,
              static_cast<long>(s.rows.count), static_cast<long>(s.rows.hidden), ours, first_name,
              first, ours / first);
  if (second_name != nullptr)
    std::printf(" | %s %8.0f us, ratio %5.2f", second_name, second, ours / second);
  std::printf("\n");
  std::fflush(stdout);
}

void run_norm(const Setting& s) {
  const auto own = s.shards[s.comm->rank()];
  auto x = torch::randn({s.rows.count, own}).set_requires_grad(true);
  const auto dy = torch::randn({s.rows.count, own});
  auto weight = torch::ones({own}).set_requires_grad(true);
  auto bias = torch::zeros({own}).set_requires_grad(true);
  auto whole_weight = torch::ones({s.rows.hidden}).set_requires_grad(true);
  auto whole_bias = torch::zeros({s.rows.hidden}).set_requires_grad(true);
  const auto split = [&] {
    namespace F = syncnorm::functional;
    return s.layer
               ? F::tensor_parallel_layer_norm(x,
                                               F::TensorParallelLayerNormFuncOptions(s.rows.hidden)
                                                   .weight(weight)
                                                   .bias(bias)
                                                   .communicator(s.comm))
               : F::tensor_parallel_rms_norm(x, F::TensorParallelRMSNormFuncOptions(s.rows.hidden)
                                                    .weight(weight)
                                                    .communicator(s.comm));
  };
  const auto clear = [&] { x.mutable_grad() = torch::Tensor(); };
  split().backward(dy);
  const auto ours = x.grad().clone();
  clear();
  gather_then_norm(x, s, whole_weight, whole_bias).backward(dy);
  TORCH_CHECK(torch::allclose(ours, x.grad(), 1e-3, 1e-4),
              "the results differ, so there is nothing to time");
  clear();
  const int repetitions = 25;
  const double local = median_us(*s.comm, repetitions, [&] {
    whole_norm(x, s.layer, weight, bias).backward(dy);
    clear();
  });
  const double gathered = median_us(*s.comm, repetitions, [&] {
    gather_then_norm(x, s, whole_weight, whole_bias).backward(dy);
    clear();
  });
  const double time = median_us(*s.comm, repetitions, [&] {
    split().backward(dy);
    clear();
  });
  print(s.layer ? "LayerNorm" : "RMSNorm", s, time, "ATen, own columns", local, "gather, norm",
        gathered);
}

void run_norm_linear(const Setting& s) {
  const auto kind = s.layer ? syncnorm::NormKind::layer : syncnorm::NormKind::rms;
  syncnorm::NormColumnParallelLinear fused(
      syncnorm::NormColumnParallelLinearOptions(s.rows.hidden, s.rows.hidden)
          .norm(kind)
          .communicator(s.comm));
  const auto norm = [&](const torch::Tensor& x) {
    return s.layer ? fused->layer_norm->forward(x) : fused->rms_norm->forward(x);
  };
  auto x = torch::randn({s.rows.count, s.shards[s.comm->rank()]}).set_requires_grad(true);
  const auto clear = [&] { x.mutable_grad() = torch::Tensor(); };
  const auto y = fused(x);
  TORCH_CHECK(torch::allclose(y, fused->linear->forward(norm(x)), 1e-3, 1e-4),
              "the results differ, so there is nothing to time");
  const auto dy = torch::randn_like(y);
  const double apart = median_us(*s.comm, 15, [&] {
    fused->linear->forward(norm(x)).backward(dy);
    clear();
  });
  const double alone = median_us(*s.comm, 15, [&] {
    fused->linear->forward(x).backward(dy);
    clear();
  });
  const double time = median_us(*s.comm, 15, [&] {
    fused(x).backward(dy);
    clear();
  });
  print(s.layer ? "LayerNorm with linear" : "RMSNorm with linear", s, time, "norm, then linear",
        apart, "linear alone", alone);
}

}  // namespace

int main(int argc, char** argv) {
  syncnorm::Environment environment(argc, argv);
  const auto& comm = environment.world();
  if (comm->rank() == 0)
    std::printf(
        "norms of split rows, forward + backward, float, %d ranks, %d threads each, %s, %u cores\n",
        comm->size(), at::get_num_threads(), syncnorm::bench::processor().c_str(),
        std::thread::hardware_concurrency());
  for (const bool layer : {true, false})
    for (const auto& rows : std::vector<Rows>{{512, 4096}, {2048, 1024}, {32, 8192}, {1, 8192}})
      run_norm({comm, layer, rows, syncnorm::balanced_shards(rows.hidden, comm->size())});
  for (const bool layer : {true, false})
    for (const auto& rows : std::vector<Rows>{{512, 1024}, {1, 1024}})
      run_norm_linear({comm, layer, rows, syncnorm::balanced_shards(rows.hidden, comm->size())});
}
