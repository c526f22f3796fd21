#include <algorithm>
#include <map>

#include "layers.h"
#include "syncnorm/tensor_parallel_norm.h"
#include "syncnorm/transformer.h"

namespace check_layer {
namespace {

using namespace syncnorm;

using Group = std::shared_ptr<Communicator>;

NormKind norm_of(const Choice& choice) {
  return choice.norm == "layer" ? NormKind::layer : NormKind::rms;
}

Residual residual_of(const Choice& choice) {
  return choice.residual == "sharded" ? Residual::sharded : Residual::replicated;
}

/// The last of the dimensions of a stream [batch, positions, features], cut evenly.
std::function<Sharding(const Group&)> columns(int64_t features) {
  return [=](const Group& comm) {
    return Sharding::consecutive(comm, 2, balanced_shards(features, comm->size()));
  };
}

/// Sets make and forward for the holder that `build` makes over a group.
template <typename F>
void use(LayerCheck& check, F build) {
  using Holder = decltype(build(Group()));
  check.make = [build](const Group& comm) -> std::shared_ptr<torch::nn::Module> {
    return build(comm).ptr();
  };
  check.forward = [](torch::nn::Module& layer, const torch::Tensor& x) {
    return dynamic_cast<typename Holder::ContainedType&>(layer).forward(x);
  };
}

/// Payload of what crosses ranks with one part of a transformer on a stream: `extra` are the bytes
/// of statistics, forward and backward.
struct Extra {
  int64_t forward = 0, backward = 0;
};

void expect_stream(LayerCheck& check, const Choice& choice, const Communicator& comm, int64_t parts,
                   int64_t element, const Extra& extra) {
  const int64_t rows = choice.batch * choice.positions;
  if (residual_of(choice) == Residual::replicated) {
    check.forward_collectives = check.backward_collectives = parts;
    check.forward_bytes = check.backward_bytes = parts * element * rows * choice.hidden;
    return;
  }
  const int64_t own = balanced_shards(choice.hidden, comm.size())[comm.rank()];
  check.forward_collectives = check.backward_collectives = 2 * parts;
  const int64_t stream = parts * element * rows * (own + choice.hidden);
  check.forward_bytes = stream + parts * extra.forward;
  check.backward_bytes = stream + parts * extra.backward;
}

Extra norm_statistics(const Choice& choice, const Communicator& comm, int64_t element) {
  const int64_t rows = choice.batch * choice.positions;
  const bool layer = choice.norm == "layer";
  const int64_t words = layer ? 2 : 1;
  const int64_t own = balanced_shards(choice.hidden, comm.size())[comm.rank()];
  const int64_t elements_a_mean = element == 2 ? 2 : 1;
  return {8 * (1 + words * rows) + (layer ? 2 * own * std::max<int64_t>(element, 4) : 0),
          element * elements_a_mean * words * rows * comm.size()};
}

LayerCheck norm_check(const Choice& choice) {
  LayerCheck check;
  const int64_t hidden = choice.hidden, rows = choice.batch * choice.positions;
  const bool layer = choice.layer == "layer_norm";
  if (layer) {
    use(check, [=](const Group& comm) {
      return TensorParallelLayerNorm(
          TensorParallelLayerNormOptions(hidden).communicator(comm).name("norm"));
    });
  } else {
    use(check, [=](const Group& comm) {
      return TensorParallelRMSNorm(
          TensorParallelRMSNormOptions(hidden).communicator(comm).name("norm"));
    });
  }
  check.input_sharding = check.output_sharding = columns(hidden);
  const int64_t words = (layer ? 2 : 1) * rows;
  check.forward_collectives = check.backward_collectives = 1;
  check.forward_bytes = 8 * (4 + words);
  check.backward_bytes = 8 * (2 + words);
  return check;
}

/// attention, mlp or block: what stands on a residual stream and gives one.
LayerCheck stream_check(const Choice& choice, const Group& group_of_check, int64_t element) {
  const auto& comm = *group_of_check;
  LayerCheck check;
  const auto residual = residual_of(choice);
  const auto norm = norm_of(choice);
  int64_t parts = 1;
  if (choice.layer == "attention") {
    use(check, [=](const Group& group) {
      return ParallelAttention(ParallelAttentionOptions(choice.hidden, choice.heads)
                                   .kv_heads(choice.kv_heads)
                                   .norm(norm)
                                   .rope_theta(10000)
                                   .residual(residual)
                                   .communicator(group)
                                   .name("attention"));
    });
  } else if (choice.layer == "mlp") {
    use(check, [=](const Group& group) {
      return ParallelMLP(ParallelMLPOptions(choice.hidden, 4 * choice.hidden)
                             .norm(norm)
                             .residual(residual)
                             .communicator(group)
                             .name("mlp"));
    });
  } else {
    parts = 2;
    static const std::map<std::string, Placement> placements{{"pre", Placement::pre},
                                                             {"post", Placement::post},
                                                             {"sandwich", Placement::sandwich},
                                                             {"deepnorm", Placement::deepnorm}};
    auto options = ParallelTransformerBlockOptions(choice.hidden, choice.heads)
                       .kv_heads(choice.kv_heads)
                       .placement(placements.at(choice.placement))
                       .norm(norm)
                       .rope_theta(10000)
                       .residual(residual);
    if (choice.placement == "deepnorm") options.deepnorm(DeepNorm::decoder(12));
    use(check, [=](const Group& group) {
      auto mine = options;
      return ParallelTransformerBlock(mine.communicator(group).name("block"));
    });
  }
  if (residual == Residual::sharded)
    check.input_sharding = check.output_sharding = columns(choice.hidden);
  // Key heads that ranks share and norms behind a part bring collectives of their own.
  Sharding heads;
  heads.comm = group_of_check;
  heads.extent = choice.heads + 2 * choice.kv_heads;
  heads.ranges = qkv_rows(choice.heads, choice.kv_heads, 1, comm.size());
  if (heads.shared_ranges().empty() && (parts == 1 || choice.placement == "pre"))
    expect_stream(check, choice, comm, parts, element, norm_statistics(choice, comm, element));
  return check;
}

LayerCheck linear_check(const Choice& choice, const Communicator& comm, int64_t element) {
  LayerCheck check;
  const int64_t hidden = choice.hidden, rows = choice.batch * choice.positions;
  const bool sharded = residual_of(choice) == Residual::sharded;
  const int64_t own = balanced_shards(hidden, comm.size())[comm.rank()];
  if (choice.layer == "column") {
    use(check, [=](const Group& group) {
      return ColumnParallelLinear(ColumnParallelLinearOptions(hidden, 2 * hidden)
                                      .input_is_sharded(sharded)
                                      .communicator(group)
                                      .name("column"));
    });
    check.output_sharding = columns(2 * hidden);
    if (sharded) check.input_sharding = columns(hidden);
    check.forward_collectives = sharded ? 1 : 0;
    check.backward_collectives = 1;
    check.forward_bytes = sharded ? element * rows * own : 0;
    check.backward_bytes = element * rows * hidden;
  } else if (choice.layer == "row") {
    use(check, [=](const Group& group) {
      return RowParallelLinear(RowParallelLinearOptions(2 * hidden, hidden)
                                   .scatter_output(sharded)
                                   .communicator(group)
                                   .name("row"));
    });
    check.input_sharding = columns(2 * hidden);
    if (sharded) check.output_sharding = columns(hidden);
    check.forward_collectives = 1;
    check.backward_collectives = sharded ? 1 : 0;
    check.forward_bytes = element * rows * hidden;
    check.backward_bytes = sharded ? element * rows * own : 0;
  } else {
    use(check, [=](const Group& group) {
      return NormColumnParallelLinear(NormColumnParallelLinearOptions(hidden, 2 * hidden)
                                          .norm(norm_of(choice))
                                          .residual(residual_of(choice))
                                          .communicator(group)
                                          .name("norm_linear"));
    });
    check.output_sharding = columns(2 * hidden);
    if (sharded) check.input_sharding = columns(hidden);
    const auto extra = norm_statistics(choice, comm, element);
    check.forward_collectives = sharded ? 1 : 0;
    check.backward_collectives = 1;
    check.forward_bytes = sharded ? element * rows * own + extra.forward : 0;
    check.backward_bytes = element * rows * hidden + (sharded ? extra.backward : 0);
  }
  return check;
}

}  // namespace

const std::vector<std::string>& known_layers() {
  static const std::vector<std::string> names{"layer_norm",  "rms_norm",  "column", "row",
                                              "norm_linear", "attention", "mlp",    "block"};
  return names;
}

LayerCheck known_check(const Choice& choice, const std::shared_ptr<Communicator>& comm) {
  const int64_t element = choice.dtype == "double" ? 8 : choice.dtype == "float" ? 4 : 2;
  auto check = choice.layer == "layer_norm" || choice.layer == "rms_norm" ? norm_check(choice)
               : choice.layer == "column" || choice.layer == "row" || choice.layer == "norm_linear"
                   ? linear_check(choice, *comm, element)
                   : stream_check(choice, comm, element);
  check.name = choice.layer;
  int64_t features = choice.hidden;
  if (choice.layer == "row") features *= 2;
  check.input_shape = {choice.batch, choice.positions, features};
  return check;
}

}  // namespace check_layer
