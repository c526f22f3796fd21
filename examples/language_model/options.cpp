#include "options.h"

#include <CLI/CLI.hpp>
#include <stdexcept>

#include "common/flags.h"
#include "common/recipe.h"

namespace language_model {
namespace {

using job::between;
using job::Group;
using job::one_of;

const std::string kDescription =
    "Trains a decoder-only transformer, its layers split over the ranks of an mpirun job, and "
    "writes text with it.\n"
    "Without flags: the plays of Shakespeare, byte-pair tokens, RMSNorm on a residual stream split "
    "over all ranks.";

void add_data_flags(CLI::App& app, Recipe& recipe) {
  Group group(app, "Data");
  auto* data = group.option("--data", recipe.data, "DIR", "Folder of the plays");
  group
      .option("--text", recipe.text, "FILE",
              "Your own text instead; its last tenth is held out for validation")
      ->excludes(data);
  group
      .option("--tokenizer", recipe.tokenizer, "NAME",
              "bytes, or bpe: byte pairs merged by how often the training text has them")
      ->check(one_of({"bytes", "bpe"}));
  group.option("--vocab", recipe.vocab, "N", "Tokens of --tokenizer bpe, 256 bytes included")
      ->check(between(257, 65536));
}

void add_model_flags(CLI::App& app, Recipe& recipe) {
  Group group(app, "Network");
  group.option("--layers", recipe.layers, "N", "Transformer blocks")->check(between(1, 1000));
  group.option("--hidden", recipe.hidden, "N", "Width of the residual stream")
      ->check(between(2, 65536));
  group.option("--heads", recipe.heads, "N", "Attention heads; must divide --hidden")
      ->check(between(1, 1024));
  group
      .option("--kv-heads", recipe.kv_heads, "N",
              "Key and value heads, each shared by --heads / N (0: --heads)")
      ->check(between(0, 1024));
  group
      .option("--intermediate", recipe.intermediate, "N",
              "Width inside the MLP (0: 4 times --hidden with gelu, 8/3 with swiglu)")
      ->check(between(0, 1 << 20));
  group
      .option("--placement", recipe.placement, "NAME",
              "Norms of a block: pre, post, sandwich (before and after each part) or deepnorm")
      ->check(one_of({"pre", "post", "sandwich", "deepnorm"}));
  group.option("--norm", recipe.norm, "NAME", "layer or rms")->check(one_of({"layer", "rms"}));
  group
      .option("--residual", recipe.residual, "NAME",
              "Residual stream replicated on the ranks of a tensor group, or sharded over them")
      ->check(one_of({"replicated", "sharded"}));
  group
      .option("--qk-norm", recipe.qk_norm, "NAME",
              "Norm of queries and keys: none, head (each head), full (all heads together)")
      ->check(one_of({"none", "head", "full"}));
  group.option("--activation", recipe.activation, "NAME", "gelu or swiglu")
      ->check(one_of({"gelu", "swiglu"}));
  group
      .option("--softcap", recipe.softcap, "X", "Cap s of attention scores, s tanh(x / s); 0: none")
      ->check(between(0.0, 1e6));
  group.option("--context", recipe.context, "N", "Tokens that the network sees at once")
      ->check(between(2, 65536));
  group.option("--dtype", recipe.dtype, "NAME", "Of the parameters: float or double")
      ->check(one_of({"float", "double"}));
}

void add_training_flags(CLI::App& app, Options& options) {
  Group group(app, "Training");
  auto& recipe = options.recipe;
  group.option("--batch", recipe.batch, "N", "Windows of --context tokens a step, over all ranks")
      ->check(between(1, 65536));
  group.option("--steps", recipe.steps, "N", "Optimizer steps; 0 evaluates only")
      ->check(between(0, 100000000));
  group.option("--lr", recipe.lr, "X", "Peak learning rate of AdamW")->check(between(1e-9, 1e3));
  group
      .option("--schedule", recipe.schedule, "NAME",
              "After the warm-up: cosine, down to a tenth of --lr at --steps, or constant")
      ->check(one_of({"cosine", "constant"}));
  group.option("--warmup", recipe.warmup, "STEPS", "Length of the linear warm-up")
      ->check(between(0.0, 1e8));
  group
      .option("--weight-decay", recipe.weight_decay, "X", "Of matrices; norms and biases have none")
      ->check(between(0.0, 1e3));
  group.option("--clip", recipe.clip, "X", "Largest norm of the gradient; 0: no limit")
      ->check(between(0.0, 1e9));
  group.option("--seed", recipe.seed, "N", "Of weights and batches; with --sample, of the text");
  group
      .option("--tensor-parallel", options.tensor_parallel, "N",
              "Ranks that split a model, a divisor of all; as many groups as there are share the "
              "batch (0: all ranks, one group)")
      ->check(between(0, 1 << 20));
  group.option("--log-every", options.log_every, "N", "Steps between lines of the log")
      ->check(between(1, 1000000));
  group.option("--eval-every", options.eval_every, "N", "Steps between validations")
      ->check(between(1, 100000000));
  group
      .option("--eval-windows", options.eval_windows, "N",
              "Windows of held-out text, evenly spread, that a validation looks at")
      ->check(between(1, 10000000));
  group.option("--save-every", options.save_every, "N", "Steps between checkpoints")
      ->check(between(1, 100000000));
}

void add_sample_flags(CLI::App& app, SampleOptions& sample) {
  Group group(app, "Text");
  group.option("--sample", sample.prompt, "PROMPT",
               "Go on with this text by the checkpoint in --out, on all ranks as one tensor group");
  group.option("--tokens", sample.tokens, "N", "How many tokens to write")
      ->check(between(1, 10000000));
  group
      .option("--temperature", sample.temperature, "X",
              "Divides the logits before the draw; 0 takes the likeliest token")
      ->check(between(0.0, 100.0));
  group.option("--top-k", sample.top_k, "N", "Draw from the N likeliest tokens only; 0: from all")
      ->check(between(0, 65536));
}

/// Flags of the network that do not fit each other.
void check_network(const Recipe& recipe) {
  const auto wrong = [](const std::string& flag, const std::string& why) {
    throw CLI::ValidationError("--" + flag, why);
  };
  const auto text = [](int64_t number) { return std::to_string(number); };
  if (recipe.hidden % recipe.heads != 0)
    wrong("heads", text(recipe.heads) + " do not divide --hidden " + text(recipe.hidden));
  if (recipe.hidden / recipe.heads % 2 != 0) {
    wrong("heads", "--hidden / --heads is " + text(recipe.hidden / recipe.heads) +
                       ", but rotary positions turn pairs: make it even");
  }
  if (recipe.kv_heads > 0 && recipe.heads % recipe.kv_heads != 0)
    wrong("kv-heads", text(recipe.kv_heads) + " do not divide --heads " + text(recipe.heads));
}

/// Flags that would silently do nothing, or contradict each other, beside what CLI11 checks itself.
void check_combinations(const Options& options) {
  const auto& given = options.given;
  job::check_output_flags(options.output, given);
  if (options.recipe.dtype == "double" && options.recipe.precision == "bfloat16")
    job::refuse(given, "precision", "bfloat16 goes with --dtype float");
  if (options.sample) {
    if (options.output.folder.empty())
      throw CLI::ValidationError("--sample", "needs --out, the folder of a trained model");
    const std::set<std::string> allowed = {"sample", "tokens", "temperature", "top-k",  "seed",
                                           "out",    "dtype",  "precision",   "device", "progress"};
    for (const auto& flag : given) {
      if (allowed.count(flag) == 0)
        job::refuse(given, flag, "goes with training, not with --sample");
    }
    if (options.sample->temperature == 0) {
      for (const auto* flag : {"top-k", "seed"})
        job::refuse(given, flag, "has no meaning with --temperature 0");
    }
    return;
  }
  for (const auto* flag : {"tokens", "temperature", "top-k"})
    job::refuse(given, flag, "goes with --sample");
  if (!options.output.resume) check_network(options.recipe);
}

}  // namespace

std::optional<Options> parse_options(int argc, char** argv, bool speak, int& status) {
  Options options;
  options.recipe.data = LANGUAGE_MODEL_DATA;
  SampleOptions sample;
  CLI::App app(kDescription, "language_model");
  app.get_formatter()->column_width(34);
  add_data_flags(app, options.recipe);
  add_model_flags(app, options.recipe);
  add_training_flags(app, options);
  add_sample_flags(app, sample);
  job::add_compute_flags(app, options.device, options.recipe.precision);
  job::add_output_flags(app, options.output, "metrics.jsonl, checkpoint and curves.png");
  const bool parsed = job::parse(app, argc, argv, speak, status, [&] {
    options.given = job::given_options(app);
    sample.seed = options.recipe.seed;
    if (options.given.count("sample") > 0) options.sample = sample;
    if (options.recipe.tokenizer == "bytes")
      job::refuse(options.given, "vocab", "goes with --tokenizer bpe");
    check_combinations(options);
  });
  return parsed ? std::optional(options) : std::nullopt;
}

void check_grid(const Options& options, int ranks) {
  const auto group = options.tensor_parallel == 0 ? ranks : options.tensor_parallel;
  if (group > ranks || ranks % group != 0) {
    throw std::runtime_error("--tensor-parallel " + std::to_string(group) +
                             " does not divide the " + std::to_string(ranks) +
                             " ranks of this job");
  }
  if (options.recipe.batch < ranks / group) {
    throw std::runtime_error("--batch " + std::to_string(options.recipe.batch) +
                             " is too small for " + std::to_string(ranks / group) +
                             " tensor groups, which take a window each at least: raise it, or "
                             "raise --tensor-parallel");
  }
}

// --- recipes in checkpoints ----------------------------------------------------------------------

/// Calls `each(flag, field)` for every field of a Recipe, const or not; found by job::adopt_recipe.
template <typename R, typename F>
void visit(R& recipe, F each) {
  each("data", recipe.data);
  each("text", recipe.text);
  each("tokenizer", recipe.tokenizer);
  each("vocab", recipe.vocab);
  each("layers", recipe.layers);
  each("hidden", recipe.hidden);
  each("heads", recipe.heads);
  each("kv-heads", recipe.kv_heads);
  each("intermediate", recipe.intermediate);
  each("placement", recipe.placement);
  each("norm", recipe.norm);
  each("residual", recipe.residual);
  each("qk-norm", recipe.qk_norm);
  each("activation", recipe.activation);
  each("softcap", recipe.softcap);
  each("context", recipe.context);
  each("batch", recipe.batch);
  each("steps", recipe.steps);
  each("lr", recipe.lr);
  each("warmup", recipe.warmup);
  each("weight-decay", recipe.weight_decay);
  each("clip", recipe.clip);
  each("schedule", recipe.schedule);
  each("seed", recipe.seed);
  each("dtype", recipe.dtype);
  each("precision", recipe.precision);
}

nlohmann::json to_json(const Recipe& recipe) { return job::recipe_to_json(recipe); }

void adopt(Options& options, const nlohmann::json& saved) {
  job::adopt_recipe(options.recipe, saved, options.given,
                    {"steps", "weight-decay", "clip", "data", "text", "residual"});
}

Recipe recipe_of(const nlohmann::json& saved) {
  Recipe recipe;
  job::adopt_recipe(recipe, saved, {}, {});
  return recipe;
}

}  // namespace language_model
