#include "trainer.h"

#include <cmath>
#include <limits>

#include "common/autocast.h"
#include "common/device.h"
#include "common/failure.h"
#include "common/stop.h"
#include "schedule.h"
#include "syncnorm/parameters.h"
#include "syncnorm/vocab_parallel.h"

namespace language_model {
namespace {

/// AdamW over `model`, with decay on matrices only, and moments that are there before the first
/// step so that a checkpoint may be loaded into them.
std::unique_ptr<torch::optim::AdamW> make_optimizer(const Recipe& recipe,
                                                    const LanguageModel& model) {
  std::vector<torch::Tensor> matrices, others;
  for (const auto& parameter : model->parameters())
    (parameter.dim() > 1 ? matrices : others).push_back(parameter);
  const auto options = torch::optim::AdamWOptions(recipe.lr).betas({0.9, 0.95});
  const auto group = [&](const std::vector<torch::Tensor>& parameters, double decay) {
    auto own = options;
    own.weight_decay(decay);
    return torch::optim::OptimizerParamGroup(parameters,
                                             std::make_unique<torch::optim::AdamWOptions>(own));
  };
  auto optimizer = std::make_unique<torch::optim::AdamW>(
      std::vector<torch::optim::OptimizerParamGroup>{group(matrices, recipe.weight_decay),
                                                     group(others, 0)},
      options);
  for (const auto& parameter : model->parameters()) {
    auto state = std::make_unique<torch::optim::AdamWParamState>();
    state->step(0);
    state->exp_avg(torch::zeros_like(parameter));
    state->exp_avg_sq(torch::zeros_like(parameter));
    optimizer->state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }
  return optimizer;
}

torch::optim::AdamWParamState& moments_of(torch::optim::AdamW& optimizer,
                                          const torch::Tensor& parameter) {
  return static_cast<torch::optim::AdamWParamState&>(
      *optimizer.state().at(parameter.unsafeGetTensorImpl()));
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

}  // namespace

Trainer::Trainer(const Recipe& recipe, const Tokens& tokens, const Grid& grid, torch::Device device)
    : recipe_(recipe),
      tokens_(tokens),
      grid_(grid),
      device_(device),
      model_(build_model(recipe, tokens.tokenizer.size(), grid.tensor, device)) {
  if (grid.data->size() > 1) {
    parallel_.emplace(model_, syncnorm::DistributedDataParallelOptions().communicator(grid.data));
  }
  optimizer_ = make_optimizer(recipe, model_);
}

torch::Tensor Trainer::logits(const torch::Tensor& tokens) {
  const job::Autocast autocast(device_, recipe_.precision);
  return parallel_ && model_->is_training() ? parallel_->forward(tokens) : model_->forward(tokens);
}

torch::Tensor Trainer::loss(const torch::Tensor& logits, const torch::Tensor& targets) {
  return syncnorm::vocab_parallel_cross_entropy(logits, targets,
                                                syncnorm::VocabParallelCrossEntropyOptions()
                                                    .num_classes(tokens_.tokenizer.size())
                                                    .communicator(grid_.tensor));
}

StepReport Trainer::step(int64_t number) {
  const double lr = learning_rate(recipe_, number);
  set_learning_rate(*optimizer_, lr);
  model_->train();
  optimizer_->zero_grad();
  const auto share = grid_.share(recipe_.batch);
  const auto windows = training_windows(tokens_, recipe_, number, share.first, share.count);
  const auto mean = loss(logits(job::to_device(windows.inputs, device_)),
                         job::to_device(windows.targets, device_));
  // Data parallelism averages over groups, whose shares may differ in size: this makes it the mean
  // over the whole batch.
  const double weight = static_cast<double>(share.count) / static_cast<double>(recipe_.batch);
  (mean * (weight * grid_.data->size())).backward();
  const double limit = recipe_.clip > 0 ? recipe_.clip : std::numeric_limits<double>::infinity();
  const double norm = syncnorm::clip_grad_norm(*model_, limit, grid_.tensor);

  const auto totals =
      torch::tensor({grid_.speaks_for_group() ? weight * mean.item<double>() : 0.0,
                     std::isfinite(norm) ? 0.0 : 1.0, job::stop_requested() ? 1.0 : 0.0},
                    torch::kDouble);
  grid_.world->all_reduce(totals);
  const auto total = totals[0].item<double>();
  if (!std::isfinite(total) || totals[1].item<double>() > 0) {
    throw job::Failure("the loss or its gradient is no longer a number at step " +
                       std::to_string(number + 1) +
                       ": lower --lr, lengthen --warmup or set --clip");
  }
  optimizer_->step();
  return {total, norm, lr, totals[2].item<double>() > 0};
}

Scores Trainer::evaluate(int64_t windows) {
  const torch::NoGradGuard no_grad;
  model_->eval();
  const auto share = grid_.share(windows);
  const int64_t at_once = std::max<int64_t>(1, grid_.share(recipe_.batch).count);
  double nats = 0, tokens = 0, bytes = 0;
  for (int64_t done = 0; done < share.count; done += at_once) {
    const auto count = std::min(at_once, share.count - done);
    const auto part =
        held_out_windows(tokens_, recipe_.context, windows, share.first + done, count);
    const auto mean =
        loss(logits(job::to_device(part.inputs, device_)), job::to_device(part.targets, device_));
    nats += mean.item<double>() * static_cast<double>(part.targets.numel());
    tokens += static_cast<double>(part.targets.numel());
    bytes += tokens_.bytes.index_select(0, part.targets.flatten()).sum().item<double>();
  }
  const auto totals =
      torch::tensor({nats, tokens, bytes}, torch::kDouble) * (grid_.speaks_for_group() ? 1.0 : 0.0);
  grid_.world->all_reduce(totals);
  nats = totals[0].item<double>();
  tokens = totals[1].item<double>();
  bytes = totals[2].item<double>();
  return {nats / tokens,
          nats / bytes,
          std::exp(nats / tokens),
          std::exp(nats / bytes),
          static_cast<int64_t>(tokens),
          static_cast<int64_t>(bytes)};
}

std::vector<syncnorm::ShardedTensor> Trainer::state() {
  std::vector<syncnorm::ShardedTensor> all;
  for (const auto& part : syncnorm::sharded_tensors(*model_)) {
    all.push_back({"model." + part.name, part.tensor, part.sharding});
    if (!part.tensor.requires_grad()) continue;
    auto& moments = moments_of(*optimizer_, part.tensor);
    all.push_back({"exp_avg." + part.name, moments.exp_avg(), part.sharding});
    all.push_back({"exp_avg_sq." + part.name, moments.exp_avg_sq(), part.sharding});
  }
  return all;
}

void Trainer::set_steps_taken(int64_t steps) {
  for (const auto& parameter : model_->parameters()) moments_of(*optimizer_, parameter).step(steps);
}

}  // namespace language_model
