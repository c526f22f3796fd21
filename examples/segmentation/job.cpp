#include "job.h"

#include <torch/torch.h>

namespace segmentation {

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

}  // namespace segmentation
