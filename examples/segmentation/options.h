#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/output.h"

namespace segmentation {

/// Everything that shapes the result of one training run. Fields are named as their flags, '_' for
/// '-'.
struct Recipe {
  std::string data, images, masks;
  std::vector<std::string> palette;  ///< "rrggbb" by class
  int64_t classes = 0;               ///< 0: found in the masks
  std::string size;                  ///< "HEIGHTxWIDTH", empty: the data's default
  std::optional<double> test_fraction;
  std::optional<int64_t> test_blocks, gap;

  std::string norm = "sync";
  int64_t width = 12, depth = 3, groups = 4;

  int64_t epochs = 40;
  int64_t batch_per_rank = 2;
  std::string optimizer = "sgd";
  double lr = 0.1, momentum = 0.9, weight_decay = 1e-4, warmup = 1;
  std::string schedule = "poly";
  uint64_t seed = 0;
  bool no_augment = false;
  double noise = 0.05, contrast = 0.05;
  std::string precision = "float";
};

/// The command line.
struct Options {
  Recipe recipe;
  job::Output output;
  std::string device = "auto";
  bool compare = false, quick = false;
  int64_t seeds = 3;
  std::set<std::string> given;  ///< names of the flags on the command line, without dashes
};

/// Parses the command line. nullopt: the program is to end with `status` (help was asked for, or a
/// flag is wrong), what there is to say having been printed where `speak` is set.
std::optional<Options> parse_options(int argc, char** argv, bool speak, int& status);

nlohmann::json to_json(const Recipe& recipe);

/// Takes over a checkpoint's recipe, except for what may change on the way: epochs, batch per rank
/// and the data's place. Raises std::runtime_error naming every flag that was given with another
/// value than the checkpoint's.
void adopt(Options& options, const nlohmann::json& saved);

struct Size {
  int64_t height, width;
};

/// `recipe.size` in numbers, nullopt where it is empty.
std::optional<Size> picture_size(const Recipe& recipe);

/// "rrggbb" in hexadecimal digits, as bytes; raises std::runtime_error for anything else.
std::array<uint8_t, 3> parse_color(const std::string& text);

}  // namespace segmentation
