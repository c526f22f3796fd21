#include "common/hardware.h"

#include <torch/torch.h>
#include <torch/version.h>

#include <fstream>
#include <thread>

namespace job {
namespace {

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

}  // namespace

std::string counted(int64_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string hardware(const syncnorm::Environment& environment, c10::Device device) {
  const auto nodes = torch::tensor({int64_t{environment.local_rank() == 0}});
  environment.world()->all_reduce(nodes);
  return counted(environment.world()->size(), "rank") + " on " +
         counted(nodes.item<int64_t>(), "node") + ", " +
         counted(torch::get_num_threads(), "thread") + " each; " + processor() + ", " +
         counted(std::thread::hardware_concurrency(), "core") + "; " + device.str() +
         "; LibTorch " + TORCH_VERSION;
}

}  // namespace job
