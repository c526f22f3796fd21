#include "trainer.h"

#include <cmath>
#include <optional>

#include "common/autocast.h"
#include "common/failure.h"
#include "common/stop.h"
#include "schedule.h"

namespace segmentation {
namespace {

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Recipe& recipe, const UNet& net) {
  std::vector<torch::Tensor> decayed, plain;
  for (const auto& parameter : net->parameters())
    (parameter.dim() > 1 ? decayed : plain).push_back(parameter);
  const auto groups = [&](auto options) {
    auto with_decay = options, without = options;
    with_decay.weight_decay(recipe.weight_decay);
    without.weight_decay(0);
    using OptionsType = decltype(options);
    return std::vector<torch::optim::OptimizerParamGroup>{
        {decayed, std::make_unique<OptionsType>(with_decay)},
        {plain, std::make_unique<OptionsType>(without)}};
  };
  if (recipe.optimizer == "adamw") {
    const torch::optim::AdamWOptions options(recipe.lr);
    return std::make_unique<torch::optim::AdamW>(groups(options), options);
  }
  const auto options = torch::optim::SGDOptions(recipe.lr).momentum(recipe.momentum);
  return std::make_unique<torch::optim::SGD>(groups(options), options);
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

/// The network of `recipe` on `device`, ready to train.
UNet prepare_net(const Recipe& recipe, const Dataset& dataset,
                 const std::shared_ptr<syncnorm::Communicator>& comm, torch::Device device) {
  constexpr int64_t kCalibrationPictures = 16;
  auto net = build_unet(dataset.channels(), dataset.classes(), recipe, comm);
  net->to(device);
  if (recipe.norm == "frozen") {
    std::vector<int64_t> some;
    const auto count = static_cast<int64_t>(dataset.train.size());
    const auto taken = std::min(count, kCalibrationPictures);
    for (int64_t i = 0; i < taken; ++i) some.push_back(dataset.train[i * count / taken]);
    net->calibrate(job::to_device(plain_batch(dataset, some).pictures, device));
  }
  net->train();
  return net;
}

}  // namespace

Trainer::Trainer(const Recipe& recipe, const Dataset& dataset, const job::Placement& placement)
    : recipe_(recipe),
      dataset_(dataset),
      comm_(placement.comm),
      device_(placement.device),
      sampler_(static_cast<int64_t>(dataset.train.size()), recipe.batch_per_rank * comm_->size(),
               comm_->rank(), comm_->size(), /*shuffle=*/true, recipe.seed),
      parallel_(prepare_net(recipe, dataset, comm_, device_),
                syncnorm::DistributedDataParallelOptions().communicator(comm_)),
      optimizer_(make_optimizer(recipe, net())) {}

Trainer::Work Trainer::prepare(int64_t epoch, int64_t step) {
  const auto share = sampler_.batch(step);
  std::vector<int64_t> indices;
  for (const auto i : share.indices) indices.push_back(dataset_.train[i]);
  const auto batch = training_batch(dataset_, indices, recipe_, epoch);
  return {{job::to_device(batch.pictures, device_), job::to_device(batch.labels, device_)},
          share.global_size};
}

torch::Tensor Trainer::step(const Work& work) {
  namespace F = torch::nn::functional;
  optimizer_->zero_grad();
  torch::Tensor scores;
  {
    const job::Autocast autocast(device_, recipe_.precision);
    scores = parallel_(work.batch.pictures);
  }
  const auto options =
      F::CrossEntropyFuncOptions().ignore_index(kIgnoredLabel).reduction(torch::kSum);
  const auto pixels = static_cast<double>(dataset_.height() * dataset_.width());
  const auto loss = F::cross_entropy(scores.to(torch::kFloat), work.batch.labels, options) / pixels;
  // Data parallelism averages over ranks, whose shards may differ in size: this makes it the mean
  // over the global batch.
  (loss * (static_cast<double>(comm_->size()) / static_cast<double>(work.global_size))).backward();
  optimizer_->step();
  return loss.detach();
}

void Trainer::train_epoch(Position& position, const std::function<void(const StepReport&)>& watch) {
  const auto count = static_cast<int64_t>(dataset_.train.size());
  const auto global_batch = recipe_.batch_per_rank * comm_->size();
  sampler_.set_epoch(position.epoch);
  net()->train();

  // After a resume with another global batch some pictures seen before the stop come again; none is
  // skipped.
  const auto first_step = position.images / global_batch;
  if (position.images > 0) {
    const auto kept = first_step * global_batch;
    position.loss *= static_cast<double>(kept) / static_cast<double>(position.images);
    position.images = kept;
  }
  std::optional<Work> ready;  // for the step to come
  for (auto step_index = first_step; step_index < sampler_.steps() && !stopping_; ++step_index) {
    const auto work = ready ? *ready : prepare(position.epoch, step_index);
    const auto middle =
        static_cast<double>(position.images) + 0.5 * static_cast<double>(work.global_size);
    const double lr = learning_rate(
        recipe_, static_cast<double>(position.epoch) + middle / static_cast<double>(count));
    set_learning_rate(*optimizer_, lr);

    const auto loss = step(work);
    // Before waiting for the loss: a GPU computes meanwhile.
    ready.reset();
    if (step_index + 1 < sampler_.steps()) ready = prepare(position.epoch, step_index + 1);
    const auto totals =
        torch::tensor({loss.item<double>(), job::stop_requested() ? 1.0 : 0.0}, torch::kDouble);
    comm_->all_reduce(totals);
    position.loss += totals[0].item<double>();
    position.images += work.global_size;
    if (!std::isfinite(position.loss)) {
      throw job::Failure("the loss is no longer a number in epoch " +
                         std::to_string(position.epoch + 1) + ": lower --lr or lengthen --warmup");
    }
    stopping_ = totals[1].item<double>() > 0;
    watch({position.images, position.loss / static_cast<double>(position.images), lr});
    if (step_index + 1 == sampler_.steps()) {
      position = {position.epoch + 1, 0, 0.0};
      return;
    }
  }
}

void Trainer::share_buffers() {
  if (recipe_.norm != "batch") return;
  for (const auto& buffer : net()->buffers()) comm_->broadcast(buffer, 0);
}

Scores Trainer::test() {
  share_buffers();
  const job::Autocast autocast(device_, recipe_.precision);
  return evaluate(net(), dataset_, dataset_.test, device_, *comm_);
}

torch::Tensor Trainer::predict(const std::vector<int64_t>& indices) {
  const job::Autocast autocast(device_, recipe_.precision);
  return segmentation::predict(net(), dataset_, indices, device_);
}

}  // namespace segmentation
