#include "figures.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace segmentation {

std::vector<int64_t> spread(const std::vector<int64_t>& indices, int64_t count) {
  const auto all = static_cast<int64_t>(indices.size());
  count = std::min(count, all);
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < count; ++i) chosen.push_back(indices[(2 * i + 1) * all / (2 * count)]);
  return chosen;
}

void write_predictions(const std::string& folder, const Dataset& dataset,
                       const std::vector<int64_t>& indices, const torch::Tensor& predicted) {
  const auto chosen = torch::tensor(indices, torch::kLong);
  const auto images = dataset.images.index_select(0, chosen);
  const auto labels = dataset.labels.index_select(0, chosen).unsqueeze(1);
  const auto planes = torch::cat({images, labels, predicted.unsqueeze(1)}, 1).contiguous();
  std::ofstream pixels(folder + "/predictions.bin", std::ios::binary);
  pixels.write(static_cast<const char*>(planes.data_ptr()), planes.numel());

  std::vector<std::string> names;
  for (const auto i : indices) names.push_back(dataset.names[i]);
  std::ofstream about(folder + "/predictions.json");
  about << nlohmann::json{{"shape", planes.sizes().vec()},
                          {"names", names},
                          {"classes", dataset.class_names},
                          {"colors", dataset.class_colors},
                          {"ignored", kIgnoredLabel}}
        << "\n";
  if (!pixels.flush() || !about.flush())
    throw std::runtime_error("cannot write predictions to " + folder);
}

}  // namespace segmentation
