#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>

#include "common/output.h"

namespace language_model {

/// Everything that shapes the result of one training run. Fields are named as their flags, '_' for
/// '-'.
struct Recipe {
  std::string data, text;
  std::string tokenizer = "bpe";
  int64_t vocab = 1024;

  int64_t layers = 4, hidden = 128, heads = 4, kv_heads = 0, intermediate = 0;
  std::string placement = "pre", norm = "rms", residual = "sharded", qk_norm = "none";
  std::string activation = "swiglu";
  double softcap = 0;
  int64_t context = 128;

  int64_t batch = 8, steps = 1000;
  double lr = 3e-3, warmup = 50, weight_decay = 0.1, clip = 1;
  std::string schedule = "cosine";
  uint64_t seed = 0;
  std::string dtype = "float", precision = "float";
};

/// What to write from a trained model.
struct SampleOptions {
  std::string prompt;
  int64_t tokens = 400;
  double temperature = 0.8;
  int64_t top_k = 0;  ///< 0: all tokens
  uint64_t seed = 0;
};

/// The command line.
struct Options {
  Recipe recipe;
  job::Output output;
  std::string device = "auto";
  std::optional<SampleOptions> sample;  ///< absent: train
  int64_t tensor_parallel = 0;          ///< ranks of a tensor group; 0: all
  int64_t log_every = 20, eval_every = 100, save_every = 200;
  int64_t eval_windows = 64;
  std::set<std::string> given;  ///< names of the flags on the command line, without dashes
};

/// Parses the command line. nullopt: the program is to end with `status` (help was asked for, or a
/// flag is wrong), what there is to say having been printed where `speak` is set.
std::optional<Options> parse_options(int argc, char** argv, bool speak, int& status);

nlohmann::json to_json(const Recipe& recipe);

/// Takes over a checkpoint's recipe, except for what may change on the way: steps, weight decay,
/// clipping, the data's place and how the residual stream lies. Raises std::runtime_error naming
/// every flag that was given with another value than the checkpoint's.
void adopt(Options& options, const nlohmann::json& saved);

/// The recipe of a checkpoint.
Recipe recipe_of(const nlohmann::json& saved);

/// Raises std::runtime_error, naming the flag, for what does not fit `ranks` processes.
void check_grid(const Options& options, int ranks);

}  // namespace language_model
