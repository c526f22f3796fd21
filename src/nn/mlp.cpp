#include "syncnorm/mlp.h"

#include "nn/child.h"
#include "syncnorm/environment.h"

namespace syncnorm {

ParallelMLPImpl::ParallelMLPImpl(ParallelMLPOptions options_)
    : NamedModule("ParallelMLP", options_.name()), options(std::move(options_)) {
  options.communicator(communicator_or_world(options.communicator(), display_name()));
  TORCH_CHECK_VALUE(options.hidden() > 0 && options.intermediate() > 0, display_name(),
                    ": hidden (", options.hidden(), ") and intermediate (", options.intermediate(),
                    ") must be positive");
  ParallelMLPImpl::reset();
}

void ParallelMLPImpl::reset() {
  const auto& comm = options.communicator();
  const int64_t intermediate = options.intermediate();
  const bool gated = options.activation() == Activation::swiglu;
  in_proj = register_module(
      "in_proj",
      NormColumnParallelLinear(
          NormColumnParallelLinearOptions(options.hidden(), gated ? 2 * intermediate : intermediate)
              .norm(options.norm())
              .eps(options.eps())
              .residual(options.residual())
              .in_shard_sizes(options.hidden_shards())
              .rows(gated ? gate_up_rows(intermediate, comm->size()) : RangesByRank())
              .bias(options.bias())
              .seed(child_seed(options.seed(), 0))
              .init_std(options.init_std())
              .init_scale(options.in_init_scale())
              .communicator(comm)
              .name(child_name(options.name(), "in_proj"))));
  out_proj = register_module(
      "out_proj", RowParallelLinear(RowParallelLinearOptions(intermediate, options.hidden())
                                        .scatter_output(options.residual() == Residual::sharded)
                                        .out_shard_sizes(options.hidden_shards())
                                        .bias(options.bias())
                                        .seed(child_seed(options.seed(), 1))
                                        .init_std(options.init_std())
                                        .init_scale(options.out_init_scale())
                                        .communicator(comm)
                                        .name(child_name(options.name(), "out_proj"))));
}

torch::Tensor ParallelMLPImpl::forward(const torch::Tensor& input) {
  const auto y = in_proj(input);
  if (options.activation() == Activation::gelu) return out_proj(torch::gelu(y));
  const int64_t own = y.size(-1) / 2;
  return out_proj(torch::silu(y.narrow(-1, 0, own)) * y.narrow(-1, own, own));
}

void ParallelMLPImpl::pretty_print(std::ostream& stream) const {
  stream << "ParallelMLP(hidden=" << options.hidden() << ", intermediate=" << options.intermediate()
         << ", activation=" << (options.activation() == Activation::gelu ? "gelu" : "swiglu")
         << ")";
}

}  // namespace syncnorm
