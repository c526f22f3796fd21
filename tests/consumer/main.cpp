#include <syncnorm/syncnorm.h>
#include <torch/torch.h>

#include <iostream>

int main(int argc, char** argv) {
  syncnorm::Environment environment(argc, argv);
  syncnorm::SyncBatchNorm norm(syncnorm::SyncBatchNormOptions(4).momentum(0.5));
  const torch::Tensor y = norm->forward(torch::arange(32, torch::kFloat).reshape({2, 4, 4}));
  const double mean = y.mean().item<double>();
  const double variance = y.var(/*unbiased=*/false).item<double>();
  std::cout << "mean " << mean << ", variance " << variance << ", ranks "
            << environment.world()->size() << "\n";
  return std::abs(mean) < 1e-5 && std::abs(variance - 1) < 1e-3 ? 0 : 1;
}
