#include "job.h"

#include <torch/torch.h>
#include <torch/version.h>

#include <fstream>
#include <thread>

#include "failure.h"

namespace segmentation {
namespace {

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

std::string counted(int64_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

}  // namespace

Dataset load_data(Job& job) {
  Dataset dataset;
  agree(job.world(), [&] { dataset = load_dataset(job.options.recipe); });
  job.console.line(dataset.description);

  // Digits of the checksum as numbers, to be compared with rank 0's.
  const auto checksum = dataset.checksum();
  const auto mine = torch::tensor(std::vector<int64_t>(checksum.begin(), checksum.end()));
  const auto first = mine.clone();
  job.world().broadcast(first, 0);
  agree(job.world(), [&] {
    if (!mine.equal(first)) {
      throw std::runtime_error("rank " + std::to_string(job.world().rank()) +
                               " read other data than rank 0; give every node the same files");
    }
  });
  return dataset;
}

std::string hardware(const Job& job) {
  const auto nodes = torch::tensor({int64_t{job.environment.local_rank() == 0}});
  job.world().all_reduce(nodes);
  return counted(job.world().size(), "rank") + " on " + counted(nodes.item<int64_t>(), "node") +
         ", " + counted(torch::get_num_threads(), "thread") + " each; " + processor() + ", " +
         counted(std::thread::hardware_concurrency(), "core") + "; " +
         job.environment.device().str() + "; LibTorch " + TORCH_VERSION;
}

}  // namespace segmentation
