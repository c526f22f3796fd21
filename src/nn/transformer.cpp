#include "syncnorm/transformer.h"

#include <cmath>

#include "nn/child.h"
#include "syncnorm/environment.h"
#include "syncnorm/tensor_parallel_norm.h"

namespace syncnorm {
namespace {

void check_layers(int64_t layers) {
  TORCH_CHECK_VALUE(layers > 0, "DeepNorm: the number of layers must be positive, got ", layers);
}

const char* name_of(Placement placement) {
  switch (placement) {
    case Placement::pre:
      return "pre";
    case Placement::post:
      return "post";
    case Placement::sandwich:
      return "sandwich";
    default:
      return "deepnorm";
  }
}

}  // namespace

DeepNorm DeepNorm::encoder(int64_t layers) {
  check_layers(layers);
  const auto n = static_cast<double>(layers);
  return {std::pow(2 * n, 0.25), std::pow(8 * n, -0.25)};
}

DeepNorm DeepNorm::decoder(int64_t layers) { return encoder(layers); }

std::pair<DeepNorm, DeepNorm> DeepNorm::encoder_decoder(int64_t encoder_layers,
                                                        int64_t decoder_layers) {
  check_layers(encoder_layers);
  check_layers(decoder_layers);
  const auto n = static_cast<double>(encoder_layers), m = static_cast<double>(decoder_layers);
  const double both = std::pow(n * n * n * n * m, 1.0 / 16);
  return {{0.81 * both, 0.87 / both}, {std::pow(3 * m, 0.25), std::pow(12 * m, -0.25)}};
}

ParallelTransformerBlockImpl::ParallelTransformerBlockImpl(ParallelTransformerBlockOptions options_)
    : NamedModule("ParallelTransformerBlock", options_.name()), options(std::move(options_)) {
  const bool deep = options.placement() == Placement::deepnorm;
  TORCH_CHECK_VALUE(deep == options.deepnorm().has_value(), display_name(),
                    deep ? ": placement deepnorm needs its constants, for a decoder of n layers "
                           "options.deepnorm(DeepNorm::decoder(n))"
                         : ": deepnorm constants go with placement deepnorm only");
  TORCH_CHECK_VALUE(!deep || options.out_init_scale() == 1, display_name(),
                    ": with placement deepnorm, beta scales the initial weights, not "
                    "out_init_scale");
  options.communicator(communicator_or_world(options.communicator(), display_name()));
  ParallelTransformerBlockImpl::reset();
}

torch::nn::AnyModule ParallelTransformerBlockImpl::make_norm(const std::string& name) {
  const bool sharded = options.residual() == Residual::sharded;
  const auto comm = sharded ? options.communicator() : self_communicator();
  const auto shards = sharded ? options.hidden_shards() : std::vector<int64_t>();
  const auto named = child_name(options.name(), name);
  if (options.norm() == NormKind::layer) {
    auto norm = TensorParallelLayerNorm(TensorParallelLayerNormOptions(options.hidden())
                                            .eps(options.eps().value_or(1e-5))
                                            .shard_sizes(shards)
                                            .communicator(comm)
                                            .name(named));
    return torch::nn::AnyModule(register_module(name, norm));
  }
  auto norm = TensorParallelRMSNorm(TensorParallelRMSNormOptions(options.hidden())
                                        .eps(options.eps().value_or(1e-6))
                                        .shard_sizes(shards)
                                        .communicator(comm)
                                        .name(named));
  return torch::nn::AnyModule(register_module(name, norm));
}

void ParallelTransformerBlockImpl::reset() {
  const auto placement = options.placement();
  const bool before = placement == Placement::pre || placement == Placement::sandwich;
  const auto norm = before ? std::optional(options.norm()) : std::nullopt;
  const double beta = options.deepnorm() ? options.deepnorm()->beta : 1;
  const double out_scale = options.out_init_scale() * beta;
  attention = register_module(
      "attention", ParallelAttention(ParallelAttentionOptions(options.hidden(), options.heads())
                                         .kv_heads(options.kv_heads())
                                         .head_dim(options.head_dim())
                                         .causal(options.causal())
                                         .rope_theta(options.rope_theta())
                                         .qk_norm(options.qk_norm())
                                         .softcap(options.softcap())
                                         .norm(norm)
                                         .eps(options.eps())
                                         .bias(options.bias())
                                         .residual(options.residual())
                                         .hidden_shards(options.hidden_shards())
                                         .seed(child_seed(options.seed(), 0))
                                         .init_std(options.init_std())
                                         .value_init_scale(beta)
                                         .out_init_scale(out_scale)
                                         .communicator(options.communicator())
                                         .name(child_name(options.name(), "attention"))));
  mlp = register_module(
      "mlp", ParallelMLP(ParallelMLPOptions(options.hidden(),
                                            options.intermediate().value_or(4 * options.hidden()))
                             .activation(options.activation())
                             .norm(norm)
                             .eps(options.eps())
                             .bias(options.bias())
                             .residual(options.residual())
                             .hidden_shards(options.hidden_shards())
                             .seed(child_seed(options.seed(), 1))
                             .init_std(options.init_std())
                             .in_init_scale(beta)
                             .out_init_scale(out_scale)
                             .communicator(options.communicator())
                             .name(child_name(options.name(), "mlp"))));
  attention_norm = mlp_norm = torch::nn::AnyModule();
  if (placement == Placement::pre) return;
  attention_norm = make_norm("attention_norm");
  mlp_norm = make_norm("mlp_norm");
}

torch::Tensor ParallelTransformerBlockImpl::add(const torch::Tensor& stream,
                                                const torch::Tensor& change,
                                                torch::nn::AnyModule& norm) const {
  switch (options.placement()) {
    case Placement::pre:
      return stream + change;
    case Placement::post:
      return norm.forward(stream + change);
    case Placement::sandwich:
      return stream + norm.forward<torch::Tensor>(change);
    default:
      return norm.forward(stream * options.deepnorm()->alpha + change);
  }
}

torch::Tensor ParallelTransformerBlockImpl::forward(const torch::Tensor& input,
                                                    KeyValueCache* cache) {
  const auto middle = add(input, attention->forward(input, cache), attention_norm);
  return add(middle, mlp->forward(middle), mlp_norm);
}

void ParallelTransformerBlockImpl::pretty_print(std::ostream& stream) const {
  stream << "ParallelTransformerBlock(hidden=" << options.hidden()
         << ", placement=" << name_of(options.placement())
         << ", residual=" << (options.residual() == Residual::sharded ? "sharded" : "replicated")
         << ")";
}

}  // namespace syncnorm
