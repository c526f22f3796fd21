// Checks a tensor-parallel layer: over the ranks of the job against itself on one.
#include <iostream>

#include "common/failure.h"
#include "common/flags.h"
#include "common/program.h"
#include "layers.h"

namespace {

using check_layer::Choice;

void add_flags(CLI::App& app, Choice& choice) {
  auto layers = check_layer::known_layers();
  layers.insert(layers.end(), {"own", "broken"});
  job::Group layer(app, "Layer");
  layer
      .option("--layer", choice.layer, "NAME",
              "layer_norm, rms_norm, column, row, norm_linear, attention, mlp, block; own is the "
              "layer of own_layer.cpp, broken the same with a mistake")
      ->check(job::one_of(layers));
  layer.option("--hidden", choice.hidden, "N", "features of the whole")
      ->check(job::between<int64_t>(1, 1 << 16));
  layer.option("--heads", choice.heads, "N", "query heads")->check(job::between<int64_t>(1, 1024));
  layer.option("--kv-heads", choice.kv_heads, "N", "key and value heads, a divisor of the heads")
      ->check(job::between<int64_t>(1, 1024));
  layer.option("--norm", choice.norm, "NAME", "rms or layer")->check(job::one_of({"rms", "layer"}));
  layer
      .option("--placement", choice.placement, "NAME",
              "of the block: pre, post, sandwich, deepnorm")
      ->check(job::one_of({"pre", "post", "sandwich", "deepnorm"}));
  layer
      .option("--residual", choice.residual, "NAME",
              "stream between layers: sharded by features, or replicated")
      ->check(job::one_of({"sharded", "replicated"}));
  job::Group input(app, "Input");
  input.option("--batch", choice.batch, "N", "sequences")->check(job::between<int64_t>(1, 4096));
  input.option("--positions", choice.positions, "N", "positions of each")
      ->check(job::between<int64_t>(1, 1 << 16));
  input.option("--dtype", choice.dtype, "NAME", "double, float, bfloat16 or half")
      ->check(job::one_of({"double", "float", "bfloat16", "half"}));
  input.option("--seed", choice.seed, "N", "seed of parameters and input");
}

torch::ScalarType dtype_of(const std::string& name) {
  return name == "double"     ? torch::kDouble
         : name == "float"    ? torch::kFloat
         : name == "bfloat16" ? torch::kBFloat16
                              : torch::kHalf;
}

int check(syncnorm::Environment& environment, const Choice& choice) {
  const auto& world = environment.world();
  syncnorm::LayerReport report;
  job::agree(*world, [&] {
    auto check = choice.layer == "own" || choice.layer == "broken"
                     ? check_layer::own_check(choice, choice.layer == "broken")
                     : check_layer::known_check(choice, world);
    check.dtype = dtype_of(choice.dtype);
    check.seed = choice.seed;
    report = syncnorm::check_layer(check, world);
  });
  if (world->rank() == 0) std::cout << report.table();
  return report.passed() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return job::run_program("check_layer", argc, argv, [&](syncnorm::Environment& environment) {
    Choice choice;
    CLI::App app(
        "Runs a tensor-parallel layer split over the ranks and whole on one, and compares output, "
        "gradients, collectives and bytes. The status is 0 where all agree.",
        "check_layer");
    add_flags(app, choice);
    int status = 0;
    const bool speak = environment.world()->rank() == 0;
    if (!job::parse(app, argc, argv, speak, status, [&] {
          if (choice.heads % choice.kv_heads != 0)
            throw CLI::ValidationError("--kv-heads must be a divisor of --heads");
          if (choice.hidden % choice.heads != 0 || choice.hidden / choice.heads % 2 != 0)
            throw CLI::ValidationError("--hidden must be a multiple of twice --heads");
        }))
      return status;
    return check(environment, choice);
  });
}
