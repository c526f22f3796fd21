#include "common/recipe.h"

#include <cstdio>
#include <stdexcept>

#include "options.h"

namespace segmentation {
namespace {

/// What may change on the way without making it another run.
const std::set<std::string> kFree = {"epochs", "batch-per-rank", "data", "images", "masks"};

}  // namespace

/// Calls `each(flag, field)` for every field of a Recipe, const or not; found by job::adopt_recipe.
template <typename R, typename F>
void visit(R& recipe, F each) {
  each("data", recipe.data);
  each("images", recipe.images);
  each("masks", recipe.masks);
  each("palette", recipe.palette);
  each("classes", recipe.classes);
  each("size", recipe.size);
  each("test-fraction", recipe.test_fraction);
  each("test-blocks", recipe.test_blocks);
  each("gap", recipe.gap);
  each("norm", recipe.norm);
  each("width", recipe.width);
  each("depth", recipe.depth);
  each("groups", recipe.groups);
  each("epochs", recipe.epochs);
  each("batch-per-rank", recipe.batch_per_rank);
  each("optimizer", recipe.optimizer);
  each("lr", recipe.lr);
  each("momentum", recipe.momentum);
  each("weight-decay", recipe.weight_decay);
  each("warmup", recipe.warmup);
  each("schedule", recipe.schedule);
  each("seed", recipe.seed);
  each("no-augment", recipe.no_augment);
  each("noise", recipe.noise);
  each("contrast", recipe.contrast);
  each("precision", recipe.precision);
}

nlohmann::json to_json(const Recipe& recipe) { return job::recipe_to_json(recipe); }

void adopt(Options& options, const nlohmann::json& saved) {
  job::adopt_recipe(options.recipe, saved, options.given, kFree);
}

std::optional<Size> picture_size(const Recipe& recipe) {
  if (recipe.size.empty()) return std::nullopt;
  long height = 0, width = 0;
  char after = 0;
  if (std::sscanf(recipe.size.c_str(), "%ldx%ld%c", &height, &width, &after) != 2 || height < 16 ||
      width < 16 || height > 8192 || width > 8192) {
    throw std::runtime_error(
        "\"" + recipe.size +
        "\" is not a size; write HEIGHTxWIDTH, each from 16 to 8192, as in 112x96");
  }
  return Size{height, width};
}

std::array<uint8_t, 3> parse_color(const std::string& text) {
  const auto digits = text.size() == 7 && text[0] == '#' ? text.substr(1) : text;
  if (digits.size() != 6 ||
      digits.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
    throw std::runtime_error("\"" + text +
                             "\" is not a colour; write six hexadecimal digits, as in ff8000");
  }
  std::array<uint8_t, 3> color{};
  for (int i = 0; i < 3; ++i)
    color[i] = static_cast<uint8_t>(std::stoi(digits.substr(2 * i, 2), nullptr, 16));
  return color;
}

}  // namespace segmentation
