// Achieved bandwidth of the CUDA kernels beside that of a copy from device to device, as a table
// and as JSON for report.py.
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/gpu/problem.h"
#include "gpu/graph.h"
#include "syncnorm/environment.h"

namespace syncnorm::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kUsage =
    "usage: bench_gpu RESULTS.json [MEGABYTES...]\n"
    "Times every step of the norms at these sizes of the input (default 1 4 16 64 128 256 512).\n"
    "Each call works on other tensors until twice the second-level cache has gone by; the calls "
    "are\none CUDA graph, so that no time of the host is in them. Medians of replays.\n";
constexpr int kReplays = 15;
constexpr int64_t kCheckedBytes = 20000000;  ///< the plain kernels need some ten doubles a value

/// Microseconds of one call in a graph of `calls`.
double median_time(const testing::Graph& graph, int calls) {
  cudaEvent_t start{}, stop{};
  C10_CUDA_CHECK(cudaEventCreate(&start));
  C10_CUDA_CHECK(cudaEventCreate(&stop));
  std::vector<double> times;
  for (int i = 0; i < kReplays; ++i) {
    C10_CUDA_CHECK(cudaEventRecord(start, graph.stream()));
    graph.launch();
    C10_CUDA_CHECK(cudaEventRecord(stop, graph.stream()));
    C10_CUDA_CHECK(cudaEventSynchronize(stop));
    float milliseconds = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
    times.push_back(1e3 * milliseconds / calls);
  }
  C10_CUDA_CHECK(cudaEventDestroy(start));
  C10_CUDA_CHECK(cudaEventDestroy(stop));
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  return times[kReplays / 2];
}

Json measure(const Case& c, c10::Device device, int cache_bytes) {
  const int copies = static_cast<int>(std::max<int64_t>(1, 2 * int64_t{cache_bytes} / c.bytes()));
  std::vector<std::unique_ptr<Problem>> problems;
  for (int i = 0; i < copies; ++i) {
    problems.push_back(std::make_unique<Problem>(c, device));
    // Statistics and sums are in place before the steps that read them are timed alone.
    for (const auto& step : kSteps) (problems.back().get()->*step.run)();
  }
  if (c.bytes() <= kCheckedBytes) problems.front()->check();

  const int calls = copies * std::max(1, 16 / copies);
  Json times, bandwidths;
  std::printf("%-10s %-13s %-8s %6.1f MB", c.norm.c_str(), c.layout.c_str(), c10::toString(c.dtype),
              static_cast<double>(c.bytes()) / 1e6);
  for (const auto& step : kSteps) {
    const testing::Graph graph(device, [&] {
      for (int i = 0; i < calls; ++i) (problems[i % copies].get()->*step.run)();
    });
    const double time = median_time(graph, calls);
    const double bandwidth = static_cast<double>(step.passes * c.bytes()) / time / 1e3;
    times[step.name] = time;
    bandwidths[step.name] = bandwidth;
    std::printf("  %s %.0f GB/s", step.name, bandwidth);
    if (step.run != &Problem::copy)
      std::printf(" (%.2f)", bandwidth / bandwidths["copy"].get<double>());
  }
  std::printf("\n");
  std::fflush(stdout);
  return {{"norm", c.norm},   {"layout", c.layout}, {"dtype", c10::toString(c.dtype)},
          {"shape", c.shape}, {"bytes", c.bytes()}, {"sets", copies},
          {"calls", calls},   {"us", times},        {"gb_per_s", bandwidths}};
}

Json context_of(const cudaDeviceProp& properties) {
  int driver = 0, runtime = 0;
  C10_CUDA_CHECK(cudaDriverGetVersion(&driver));
  C10_CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  const std::time_t now = std::time(nullptr);
  char date[16];
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
  return {{"gpu", properties.name},
          {"multiprocessors", properties.multiProcessorCount},
          {"cache_bytes", properties.l2CacheSize},
          {"driver", driver},
          {"runtime", runtime},
          {"torch", TORCH_VERSION},
          {"date", date}};
}

int run(int argc, char** argv) {
  Environment environment(argc, argv);
  if (argc < 2 || argv[1][0] == '-') {
    std::fputs(kUsage, stderr);
    return 2;
  }
  const auto device = environment.device();
  if (device.is_cpu()) {
    std::fprintf(stderr, "bench_gpu: no GPU\n");
    return 77;
  }
  std::vector<int64_t> megabytes;
  for (int i = 2; i < argc; ++i) megabytes.push_back(std::max(1, std::atoi(argv[i])));
  if (megabytes.empty()) megabytes = {1, 4, 16, 64, 128, 256, 512};

  const c10::DeviceGuard guard(device);
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
  Json results{{"context", context_of(properties)}, {"cases", Json::array()}};
  std::printf("%s, bandwidth and its ratio to the copy's\n", properties.name);
  for (const auto& c : cases_of(megabytes))
    results["cases"].push_back(measure(c, device, properties.l2CacheSize));
  std::ofstream file(argv[1]);
  file << results.dump(1) << "\n";
  TORCH_CHECK(file.flush().good(), "bench_gpu: cannot write ", argv[1]);
  return 0;
}

}  // namespace
}  // namespace syncnorm::bench

int main(int argc, char** argv) {
  try {
    return syncnorm::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
