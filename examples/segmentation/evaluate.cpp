#include "evaluate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/device.h"
#include "syncnorm/sampler.h"

namespace segmentation {
namespace {

constexpr int64_t kEvaluationBatch = 4;

}  // namespace

Scores score(const torch::Tensor& confusion) {
  const auto matrix = confusion.to(torch::kDouble);
  const auto right = matrix.diagonal();
  const auto truth = matrix.sum(1), predicted = matrix.sum(0);
  Scores scores;
  scores.confusion = confusion;
  int64_t occurring = 0;
  for (int64_t c = 0; c < matrix.size(0); ++c) {
    const double both = right[c].item<double>();
    const double either = truth[c].item<double>() + predicted[c].item<double>() - both;
    scores.iou.push_back(either > 0 ? both / either : std::numeric_limits<double>::quiet_NaN());
    if (either == 0) continue;
    ++occurring;
    scores.mean_iou += both / either;
    scores.dice += 2 * both / (either + both);
  }
  if (occurring > 0) {
    scores.mean_iou /= static_cast<double>(occurring);
    scores.dice /= static_cast<double>(occurring);
    scores.accuracy = right.sum().item<double>() / matrix.sum().item<double>();
  }
  return scores;
}

nlohmann::json to_json(const Scores& scores) {
  nlohmann::json iou = nlohmann::json::array();
  for (const double value : scores.iou)
    iou.push_back(std::isnan(value) ? nlohmann::json() : nlohmann::json(value));
  return {{"miou", scores.mean_iou},
          {"dice", scores.dice},
          {"accuracy", scores.accuracy},
          {"iou", iou}};
}

torch::Tensor predict(UNet& net, const Dataset& dataset, const std::vector<int64_t>& indices,
                      torch::Device device) {
  torch::NoGradGuard no_grad;
  const bool was_training = net->is_training();
  net->eval();
  std::vector<torch::Tensor> classes = {
      torch::empty({0, dataset.height(), dataset.width()}, torch::kUInt8)};
  for (size_t i = 0; i < indices.size(); i += kEvaluationBatch) {
    const std::vector<int64_t> some(
        indices.begin() + static_cast<int64_t>(i),
        indices.begin() + static_cast<int64_t>(std::min(indices.size(), i + kEvaluationBatch)));
    const auto scores = net->forward(job::to_device(plain_batch(dataset, some).pictures, device));
    classes.push_back(scores.argmax(1).to(torch::kUInt8).cpu());
  }
  net->train(was_training);
  return torch::cat(classes);
}

Scores evaluate(UNet& net, const Dataset& dataset, const std::vector<int64_t>& indices,
                torch::Device device, syncnorm::Communicator& comm) {
  const auto count = static_cast<int64_t>(indices.size());
  syncnorm::DistributedBatchSampler sampler(count, count, comm.rank(), comm.size(),
                                            /*shuffle=*/false);
  std::vector<int64_t> mine;
  for (const auto i : sampler.batch(0).indices) mine.push_back(indices[i]);

  const auto classes = dataset.classes();
  const auto truth =
      dataset.labels.index_select(0, torch::tensor(mine, torch::kLong)).to(torch::kLong);
  const auto predicted = predict(net, dataset, mine, device).to(torch::kLong);
  const auto counted = truth.ne(kIgnoredLabel);
  const auto cell = (truth * classes + predicted).masked_select(counted);
  const auto confusion = torch::bincount(cell, {}, classes * classes).view({classes, classes});
  comm.all_reduce(confusion);
  return score(confusion);
}

}  // namespace segmentation
