#include "options.h"

#include <CLI/CLI.hpp>

#include "common/flags.h"

namespace segmentation {
namespace {

using job::between;
using job::Group;
using job::one_of;

const std::string kDescription =
    "Trains a U-Net for segmentation on all ranks of an mpirun job, with batch statistics over all "
    "of them.\n"
    "Without flags: tissue classes in axial slices of a brain MRI, synchronised batch norm.";

std::string check_size(std::string& text) {
  Recipe recipe;
  recipe.size = text;
  try {
    picture_size(recipe);
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

std::string check_color(std::string& text) {
  try {
    parse_color(text);
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

void add_data_flags(CLI::App& app, Recipe& recipe) {
  Group group(app, "Data");
  auto* data = group.option("--data", recipe.data, "DIR", "Folder of the MNI152 brain volumes");
  auto* images =
      group.option("--images", recipe.images, "DIR", "Your own pictures instead, PNG or JPEG");
  auto* masks =
      group.option("--masks", recipe.masks, "DIR",
                   "Their masks, matched by file stem: class indices from 0; 255 is not counted");
  group
      .option("--palette", recipe.palette, "RRGGBB,...",
              "The masks are in these colours, in class order")
      ->delimiter(',')
      ->expected(2, 254)
      ->needs(images)
      ->transform(CLI::Validator(check_color, ""));
  group
      .option("--classes", recipe.classes, "N", "Number of classes (default: what the masks hold)")
      ->check(between(2, 254))
      ->needs(images)
      ->excludes("--palette");
  group
      .option("--size", recipe.size, "HxW",
              "Height and width to sample to (default: 112x96; your own: as they are)")
      ->transform(CLI::Validator(check_size, ""));
  group
      .option("--test-fraction", recipe.test_fraction, "X",
              "Share held out for test (default: 0.2)")
      ->check(between(0.01, 0.9));
  group
      .option("--test-blocks", recipe.test_blocks, "N",
              "Contiguous blocks it is held out in (default: 3; your own: 1)")
      ->check(between(1, 1000));
  group
      .option("--gap", recipe.gap, "N",
              "Pictures left out on either side of a block (default: 3; your own: 0)")
      ->check(between(0, 1000));
  images->needs(masks)->excludes(data);
  masks->needs(images);
}

void add_model_flags(CLI::App& app, Recipe& recipe) {
  Group group(app, "Network");
  group
      .option("--norm", recipe.norm, "NORM",
              "batch: statistics of each rank; sync: of all ranks together; group: of groups of "
              "channels of each picture; "
              "frozen: batch norm with statistics fixed at the start, scale and shift still "
              "trained; none")
      ->check(one_of({"batch", "sync", "group", "frozen", "none"}));
  group
      .option("--width", recipe.width, "N",
              "Channels at full resolution, doubled at each level below")
      ->check(between(1, 1024));
  group.option("--depth", recipe.depth, "N", "Resolution levels")->check(between(1, 7));
  group.option("--groups", recipe.groups, "N", "Groups of --norm group; must divide --width")
      ->check(between(1, 1024));
}

void add_training_flags(CLI::App& app, Recipe& recipe) {
  Group group(app, "Training");
  group
      .option("--epochs", recipe.epochs, "N",
              "Times to go through the training pictures; 0 evaluates only")
      ->check(between(0, 1000000));
  group.option("--batch-per-rank", recipe.batch_per_rank, "N", "Pictures a rank takes each step")
      ->check(between(1, 4096));
  group.option("--optimizer", recipe.optimizer, "NAME", "sgd or adamw")
      ->check(one_of({"sgd", "adamw"}));
  group.option("--lr", recipe.lr, "X", "Peak learning rate; 0.002 with adamw where not given")
      ->check(between(1e-9, 1e6));
  group.option("--momentum", recipe.momentum, "X", "Momentum of sgd")->check(between(0.0, 0.9999));
  group
      .option("--weight-decay", recipe.weight_decay, "X",
              "Of convolution weights; biases and norms have none")
      ->check(between(0.0, 1e6));
  group.option("--warmup", recipe.warmup, "EPOCHS", "Length of the linear warm-up")
      ->check(between(0.0, 1e6));
  group.option("--schedule", recipe.schedule, "NAME", "Decay after it: poly, cosine or constant")
      ->check(one_of({"poly", "cosine", "constant"}));
  group.option("--seed", recipe.seed, "N", "Of weights, order and augmentation");
  group.flag("--no-augment", recipe.no_augment, "No flips, noise and contrast");
  group
      .option("--noise", recipe.noise, "X",
              "Standard deviation of added noise; that of the data is 1")
      ->check(between(0.0, 10.0));
  group.option("--contrast", recipe.contrast, "X", "Largest relative change of contrast")
      ->check(between(0.0, 1.0));
}

void add_compare_flags(CLI::App& app, Options& options) {
  Group group(app, "Comparison");
  group.flag("--compare", options.compare,
             "Train with batch, sync and group norm at 1, 2 and 4 pictures a rank; write a table "
             "and a plot");
  group.flag("--quick", options.quick, "A first look in minutes: one seed, few epochs");
  group.option("--seeds", options.seeds, "N", "Seeds for each setting")->check(between(1, 100));
}

/// Flags that would silently do nothing, or contradict each other, beside what CLI11 checks itself.
void check_combinations(const Options& options) {
  const auto& given = options.given;
  const auto& recipe = options.recipe;
  const auto refuse = [&](const std::string& flag, const std::string& why) {
    job::refuse(given, flag, why);
  };
  if (options.compare) {
    for (const auto* flag : {"norm", "batch-per-rank", "lr", "optimizer", "seed", "resume"}) {
      refuse(flag, "is set by --compare for each of its runs (they resume by themselves)");
    }
    if (recipe.epochs == 0) refuse("epochs", "must be at least 1 with --compare");
  } else {
    for (const auto* flag : {"quick", "seeds"}) refuse(flag, "goes with --compare");
    if (recipe.norm != "group" && !options.output.resume)
      refuse("groups", "goes with --norm group");
  }
  if (options.quick) refuse("seeds", "and --quick contradict each other");
  if (recipe.optimizer == "adamw") refuse("momentum", "goes with --optimizer sgd");
  if (recipe.no_augment) {
    for (const auto* flag : {"noise", "contrast"})
      refuse(flag, "and --no-augment contradict each other");
  }
  job::check_output_flags(options.output, given);
  if ((recipe.norm == "group" || options.compare) && recipe.width % recipe.groups != 0) {
    throw CLI::ValidationError(
        "--groups",
        std::to_string(recipe.groups) + " do not divide --width " + std::to_string(recipe.width));
  }
}

}  // namespace

std::optional<Options> parse_options(int argc, char** argv, bool speak, int& status) {
  Options options;
  options.recipe.data = SEGMENTATION_DATA;
  CLI::App app(kDescription, "segmentation");
  app.get_formatter()->column_width(34);
  add_data_flags(app, options.recipe);
  add_model_flags(app, options.recipe);
  add_training_flags(app, options.recipe);
  add_compare_flags(app, options);
  job::add_compute_flags(app, options.device, options.recipe.precision);
  job::add_output_flags(app, options.output, "metrics.jsonl, checkpoint.pt, model.pt and pictures");
  const bool parsed = job::parse(app, argc, argv, speak, status, [&] {
    options.given = job::given_options(app);
    auto& recipe = options.recipe;
    if (recipe.optimizer == "adamw" && options.given.count("lr") == 0) recipe.lr = 0.002;
    check_combinations(options);
  });
  return parsed ? std::optional(options) : std::nullopt;
}

}  // namespace segmentation
