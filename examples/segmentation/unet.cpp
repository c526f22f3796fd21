#include "unet.h"

#include "syncnorm/convert.h"

namespace segmentation {
namespace {

namespace nn = torch::nn;

/// The norm goes into a Sequential, never into a typed member, so that convert_sync_batchnorm can
/// replace it.
void add_norm(nn::Sequential& layers, int64_t channels, const Recipe& recipe) {
  if (recipe.norm == "group") {
    layers->push_back(nn::GroupNorm(recipe.groups, channels));
  } else if (recipe.norm != "none") {
    layers->push_back(nn::BatchNorm2d(channels));
  }
}

nn::Sequential block(int64_t in, int64_t out, const Recipe& recipe) {
  nn::Sequential layers;
  for (const auto from : {in, out}) {
    // A norm's shift does a bias's work.
    layers->push_back(
        nn::Conv2d(nn::Conv2dOptions(from, out, 3).padding(1).bias(recipe.norm == "none")));
    add_norm(layers, out, recipe);
    layers->push_back(nn::ReLU(nn::ReLUOptions(true)));
  }
  return layers;
}

template <typename F>
void for_each_batch_norm(nn::Module& module, F action) {
  for (const auto& each : module.modules(/*include_self=*/false)) {
    if (auto* norm = each->as<nn::BatchNorm2d>()) action(*norm);
  }
}

void initialize(nn::Module& module) {
  torch::NoGradGuard no_grad;
  for (const auto& each : module.modules(/*include_self=*/false)) {
    if (auto* conv = each->as<nn::Conv2d>()) {
      nn::init::kaiming_normal_(conv->weight, 0.0, torch::kFanOut, torch::kReLU);
      if (conv->bias.defined()) conv->bias.zero_();
    }
  }
}

}  // namespace

UNetImpl::UNetImpl(int64_t channels, int64_t classes, const Recipe& recipe)
    : frozen_(recipe.norm == "frozen"), multiple_(int64_t{1} << (recipe.depth - 1)) {
  auto features = recipe.width;
  down_->push_back(block(channels, features, recipe));
  for (int64_t level = 1; level < recipe.depth; ++level, features *= 2) {
    down_->push_back(block(features, 2 * features, recipe));
  }
  for (int64_t level = 1; level < recipe.depth; ++level, features /= 2) {
    up_->push_back(
        nn::ConvTranspose2d(nn::ConvTranspose2dOptions(features, features / 2, 2).stride(2)));
    merge_->push_back(block(features, features / 2, recipe));
  }
  head_ = nn::Conv2d(nn::Conv2dOptions(features, classes, 1));
  register_module("down", down_);
  register_module("up", up_);
  register_module("merge", merge_);
  register_module("head", head_);
  initialize(*this);
}

torch::Tensor UNetImpl::forward(const torch::Tensor& pictures) {
  const auto height = pictures.size(2), width = pictures.size(3);
  const auto missing = [&](int64_t size) { return (multiple_ - size % multiple_) % multiple_; };
  auto x = pictures;
  if (missing(height) > 0 || missing(width) > 0) {
    x = torch::constant_pad_nd(x, {0, missing(width), 0, missing(height)});
  }

  std::vector<torch::Tensor> skipped;
  for (size_t level = 0; level < down_->size(); ++level) {
    if (level > 0) x = torch::max_pool2d(x, 2);
    x = down_[level]->as<nn::Sequential>()->forward(x);
    skipped.push_back(x);
  }
  for (size_t level = 0; level < up_->size(); ++level) {
    x = up_[level]->as<nn::ConvTranspose2d>()->forward(x);
    x = torch::cat({skipped[skipped.size() - 2 - level], x}, 1);
    x = merge_[level]->as<nn::Sequential>()->forward(x);
  }
  return head_->forward(x).narrow(2, 0, height).narrow(3, 0, width);
}

void UNetImpl::train(bool on) {
  Module::train(on);
  if (frozen_) for_each_batch_norm(*this, [](nn::BatchNorm2dImpl& norm) { norm.eval(); });
}

void UNetImpl::calibrate(const torch::Tensor& pictures) {
  torch::NoGradGuard no_grad;
  const bool was_training = is_training();
  for_each_batch_norm(*this, [](nn::BatchNorm2dImpl& norm) {
    norm.reset_running_stats();
    norm.options.momentum(std::nullopt);
    norm.train();
  });
  forward(pictures);
  train(was_training);
}

UNet build_unet(int64_t channels, int64_t classes, const Recipe& recipe,
                const std::shared_ptr<syncnorm::Communicator>& comm) {
  torch::manual_seed(recipe.seed);
  UNet net(channels, classes, recipe);
  if (recipe.norm == "sync") syncnorm::convert_sync_batchnorm(net.ptr(), comm);
  return net;
}

}  // namespace segmentation
