#include <algorithm>
#include <chrono>
#include <iostream>
#include <optional>
#include <random>

#include "common/autocast.h"
#include "common/stop.h"
#include "header.h"
#include "job.h"
#include "model.h"
#include "syncnorm/checkpoint.h"

namespace language_model {
namespace {

/// Draws tokens by their logits.
class Chooser {
 public:
  explicit Chooser(const SampleOptions& options) : options_(options), draw_(options.seed) {}

  /// `logits` [vocabulary].
  int64_t choose(const torch::Tensor& logits) {
    const auto scores = logits.to(torch::kCPU, torch::kDouble).contiguous();
    const auto best = scores.argmax().item<int64_t>();
    if (options_.temperature == 0) return best;
    auto weights = torch::exp((scores - scores[best]) / options_.temperature);
    if (options_.top_k > 0 && options_.top_k < scores.numel())
      weights.mul_(scores >= std::get<0>(scores.topk(options_.top_k))[-1]);
    // In the order of the vocabulary, not of the weights: a rounding that swaps two nearly equal
    // ones then changes nothing.
    const auto bounds = weights.cumsum(0);
    const auto token = torch::searchsorted(bounds, bounds[-1] * uniform(), false, /*right=*/true);
    return std::min(token.item<int64_t>(), scores.numel() - 1);
  }

 private:
  /// In [0, 1), the same with every standard library.
  double uniform() { return static_cast<double>(draw_() >> 11) * 0x1p-53; }

  SampleOptions options_;
  std::mt19937_64 draw_;
};

/// A trained model that goes on with a text, token by token. What it has seen is kept as keys and
/// values in each block, so that a step passes one token through the network.
class Writer {
 public:
  Writer(const Recipe& recipe, const Header& header, const SampleOptions& options,
         const Placement& placement)
      : comm_(placement.comm),
        device_(placement.device),
        precision_(recipe.precision),
        model_(build_model(recipe, header.tokenizer.size(), comm_, device_)),
        vocabulary_(syncnorm::balanced_shards(header.tokenizer.size(), comm_->size())),
        chooser_(options),
        context_(static_cast<size_t>(recipe.context)) {
    model_->eval();
    forget();
  }

  LanguageModel& model() { return model_; }

  /// Reads `tokens`, at least one, and returns the next, or nothing where some rank was asked to
  /// stop. Collective.
  std::optional<int64_t> next(const std::vector<int64_t>& tokens) {
    const torch::NoGradGuard no_grad;
    seen_.insert(seen_.end(), tokens.begin(), tokens.end());
    auto fresh = tokens;
    if (cached_ + fresh.size() > context_) {
      // No room for more: forget all and read the last half of a context again.
      const auto kept = std::min(seen_.size(), context_ / 2 + 1);
      fresh.assign(seen_.end() - static_cast<int64_t>(kept), seen_.end());
      forget();
    }
    cached_ += fresh.size();
    const auto logits = forward(torch::tensor(fresh).unsqueeze(0));
    const auto last = comm_->all_gather(logits[0][-1].contiguous(), vocabulary_);
    // Rank 0's choice: on unlike machines the last digit of an exponential may differ.
    const auto chosen = torch::tensor(
        {comm_->rank() == 0 ? chooser_.choose(last) : int64_t{0}, int64_t{stop_requested()}});
    comm_->all_reduce(chosen);
    if (chosen[1].item<int64_t>() > 0) return std::nullopt;
    return chosen[0].item<int64_t>();
  }

 private:
  torch::Tensor forward(const torch::Tensor& tokens) {
    const Autocast autocast(device_, precision_);
    return model_->forward(to_device(tokens, device_), &caches_);
  }

  void forget() {
    caches_ = std::vector<syncnorm::KeyValueCache>(model_->layers());
    cached_ = 0;
  }

  std::shared_ptr<syncnorm::Communicator> comm_;
  torch::Device device_;
  std::string precision_;
  LanguageModel model_;
  std::vector<int64_t> vocabulary_;
  Chooser chooser_;
  size_t context_;
  std::vector<int64_t> seen_;
  std::vector<syncnorm::KeyValueCache> caches_;
  size_t cached_ = 0;
};

std::vector<syncnorm::ShardedTensor> weights_of(LanguageModel& model) {
  auto weights = syncnorm::sharded_tensors(*model);
  for (auto& part : weights) part.name = "model." + part.name;
  return weights;
}

}  // namespace

int sample(Job& job) {
  const auto folder = job.options.output.folder + "/checkpoint";
  Header header;
  auto& recipe = job.options.recipe;
  agree(job.world(), [&] {
    header = read_header(folder);
    const auto dtype = recipe.dtype, precision = recipe.precision;
    recipe = recipe_of(header.recipe);
    if (job.options.given.count("dtype") > 0) recipe.dtype = dtype;
    if (job.options.given.count("precision") > 0) recipe.precision = precision;
  });
  const auto& options = *job.options.sample;
  Writer writer(recipe, header, options, job.placement);
  agree(job.world(), [&] {
    syncnorm::load_checkpoint(folder, weights_of(writer.model()), job.placement.comm,
                              /*ignore_unexpected=*/true);
  });

  // A model can only go on with something: without a prompt, with a new line.
  const auto prompt = header.tokenizer.encode(options.prompt.empty() ? "\n" : options.prompt);
  std::vector<int64_t> unread(prompt.begin(), prompt.end());
  if (job.is_root()) std::cout << options.prompt << std::flush;
  const auto begin = std::chrono::steady_clock::now();
  int64_t written = 0;
  for (; written < options.tokens; ++written) {
    const auto token = writer.next(unread);
    if (!token) break;
    unread = {*token};
    if (job.is_root()) std::cout << header.tokenizer.bytes(*token) << std::flush;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  if (job.is_root()) {
    std::cout << std::endl;
    std::cerr << format("[%ld tokens, %.1f a second, on %s]", written,
                        static_cast<double>(written) / took.count(),
                        counted(job.world().size(), "rank").c_str())
              << std::endl;
  }
  return 0;
}

}  // namespace language_model
