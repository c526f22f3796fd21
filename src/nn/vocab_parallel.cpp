#include "syncnorm/vocab_parallel.h"

#include <ATen/core/ivalue.h>

#include <limits>
#include <numeric>

#include "kernels/layout.h"
#include "nn/init.h"
#include "nn/shards.h"
#include "syncnorm/collectives.h"
#include "syncnorm/environment.h"

namespace syncnorm {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// Raises an error that names the first of `tokens` that is outside [0, total) and not `ignored`.
void check_tokens(const Tensor& tokens, int64_t total, std::optional<int64_t> ignored,
                  const std::string& who, const char* what) {
  auto wrong = tokens.lt(0).logical_or_(tokens.ge(total));
  if (ignored) wrong.logical_and_(tokens.ne(*ignored));
  if (!wrong.any().item<bool>()) return;
  const int64_t at = wrong.reshape({-1}).nonzero()[0].item<int64_t>();
  TORCH_CHECK_INDEX(false, who, ": ", what, " ", tokens.reshape({-1})[at].item<int64_t>(),
                    " (element ", at, " of shape ", tokens.sizes(),
                    ") is outside the vocabulary [0, ", total, ")");
}

/// Classes of the ranks before this one, of this one and of all.
struct VocabularyPart {
  VocabularyPart(const std::vector<int64_t>& sizes, int rank)
      : offset(std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0})),
        own(sizes[rank]),
        total(std::accumulate(sizes.begin(), sizes.end(), int64_t{0})) {}
  int64_t offset;
  int64_t own;
  int64_t total;
};

struct EntropyCall : torch::CustomClassHolder {
  std::shared_ptr<Communicator> comm;
  std::string name;
  int64_t offset = 0;
  int64_t own = 0;
  int64_t ignore_index = 0;
};

struct RowSums {
  Tensor largest;  // largest logit of the whole row
  Tensor
      log_sum;    // log of the sum of all exp(logit - largest); apart, since their sum loses digits
  Tensor target;  // logit of the target
};

/// 1 at this rank's target of each row, as (rows, columns), for rows that have one here.
std::pair<Tensor, Tensor> own_targets(const Tensor& targets, const EntropyCall& call) {
  const auto local = targets - call.offset;
  const auto held = local.ge(0).logical_and_(local.lt(call.own));
  const auto here = held.logical_and_(targets.ne(call.ignore_index)).nonzero().view(-1);
  return {here, local.index_select(0, here)};
}

/// `logits` [rows, own] in the dtype of the sums.
RowSums exchange_row_sums(const Tensor& logits, const Tensor& targets, const EntropyCall& call) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  const int64_t rows = logits.size(0);
  auto packed = torch::zeros({1, 3, rows}, logits.options());
  auto largest = packed[0][0];
  largest.fill_(kNone);
  if (call.own > 0) {
    largest.copy_(logits.amax(1));
    // A row of -inf alone adds nothing; subtracting its largest would give NaN.
    const auto shift = largest.masked_fill(largest.eq(kNone), 0);
    packed[0][1].copy_((logits - shift.unsqueeze(1)).exp_().sum(1));
  }
  const auto [here, columns] = own_targets(targets, call);
  packed[0][2].index_copy_(0, here, logits.index({here, columns}));
  const auto all = call.comm->all_gather(packed, std::vector<int64_t>(call.comm->size(), 1));
  RowSums result;
  result.largest = all.select(1, 0).amax(0);
  const auto sum = (all.select(1, 1) * (all.select(1, 0) - result.largest).exp()).sum(0);
  result.log_sum = sum.log();
  result.target = all.select(1, 2).sum(0);
  return result;
}

Tensor as_sums(const Tensor& logits) {
  const int64_t columns = logits.size(-1);
  const int64_t rows = c10::multiply_integers(logits.sizes().slice(0, logits.dim() - 1));
  const auto dtype = compute_dtype(logits.scalar_type());
  return logits.reshape({rows, columns}).to(dtype);
}

struct EntropyFunction : torch::autograd::Function<EntropyFunction> {
  static Variable forward(AutogradContext* ctx, const Variable& logits, const Variable& targets,
                          const c10::intrusive_ptr<EntropyCall>& call) {
    const ModuleScope scope(call->name);
    const auto sums = exchange_row_sums(as_sums(logits), targets, *call);
    const auto valid = targets.ne(call->ignore_index);
    const auto count = valid.sum().to(sums.log_sum.scalar_type());
    ctx->save_for_backward({logits, targets, sums.largest, sums.log_sum, count});
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    const auto losses = sums.log_sum + (sums.largest - sums.target);
    return losses.masked_fill(valid.logical_not(), 0).sum() / count;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto call =
        c10::static_intrusive_pointer_cast<EntropyCall>(ctx->saved_data["call"].toCapsule());
    const auto saved = ctx->get_saved_variables();
    const auto& logits = saved[0];
    const auto& targets = saved[1];
    const bool again = at::GradMode::is_enabled();
    auto softmax = again
                       ? differentiable_softmax(as_sums(logits), saved[2], *call)
                       : ((as_sums(logits) - saved[2].unsqueeze(1)) - saved[3].unsqueeze(1)).exp_();
    const auto [here, columns] = own_targets(targets, *call);
    auto onehot = torch::zeros_like(softmax, softmax.options().requires_grad(false));
    onehot.index_put_({here, columns}, torch::ones({}, onehot.options()));
    const auto gradient =
        again ? copy_to_ranks(gradients[0], call->comm, call->name) : gradients[0];
    const auto ignored = targets.eq(call->ignore_index).unsqueeze(1);
    const auto result = ((softmax - onehot) * (gradient / saved[4])).masked_fill(ignored, 0);
    return {result.to(logits.scalar_type()).view(logits.sizes()), {}, {}};
  }

  static Tensor differentiable_softmax(const Tensor& logits, const Tensor& largest,
                                       const EntropyCall& call) {
    const auto powers = (logits - largest.unsqueeze(1)).exp();
    const auto sum = reduce_from_ranks(powers.sum(1), call.comm, call.name);
    return powers / copy_to_ranks(sum, call.comm, call.name).unsqueeze(1);
  }
};

std::vector<int64_t> class_shards(const VocabParallelCrossEntropyOptions& options, int ranks,
                                  int64_t own) {
  const auto& sizes = options.shard_sizes();
  if (sizes.empty() && options.num_classes() == 0 && ranks == 1) return {own};
  TORCH_CHECK_VALUE(!sizes.empty() || options.num_classes() > 0, options.name(),
                    ": needs .num_classes(V) or .shard_sizes(classes by rank)");
  const int64_t total = options.num_classes() > 0
                            ? options.num_classes()
                            : std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  return sizes_or_balanced(sizes, total, ranks, options.name(), "shard_sizes");
}

void check_entropy_input(const Tensor& logits, const Tensor& targets, const std::string& who) {
  TORCH_CHECK_VALUE(logits.defined() && targets.defined(), who,
                    ": logits and targets must be defined");
  TORCH_CHECK_VALUE(logits.is_floating_point(), who, ": logits must be floating point, got ",
                    logits.scalar_type());
  TORCH_CHECK_VALUE(targets.scalar_type() == torch::kLong, who, ": targets must be int64, got ",
                    targets.scalar_type());
  TORCH_CHECK_VALUE(
      logits.dim() > 0 && logits.sizes().slice(0, logits.dim() - 1) == targets.sizes(), who,
      ": logits [..., own classes] need targets [...], got ", logits.sizes(), " and ",
      targets.sizes());
  TORCH_CHECK_VALUE(logits.device() == targets.device(), who, ": logits are on ", logits.device(),
                    ", targets on ", targets.device());
}

}  // namespace

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(VocabParallelEmbeddingOptions options_)
    : NamedModule("VocabParallelEmbedding", options_.name()), options(std::move(options_)) {
  options.communicator(communicator_or_world(options.communicator(), display_name()));
  const int ranks = options.communicator()->size();
  TORCH_CHECK_VALUE(options.num_embeddings() > 0 && options.embedding_dim() > 0, display_name(),
                    ": num_embeddings and embedding_dim must be positive, got ",
                    options.num_embeddings(), " and ", options.embedding_dim());
  options.shard_sizes(sizes_or_balanced(options.shard_sizes(), options.num_embeddings(), ranks,
                                        display_name(), "shard_sizes"));
  options.out_shard_sizes(sizes_or_balanced(options.out_shard_sizes(), options.embedding_dim(),
                                            ranks, display_name(), "out_shard_sizes"));
  tokens_ = Sharding::consecutive(options.communicator(), 0, options.shard_sizes());
  VocabParallelEmbeddingImpl::reset();
}

void VocabParallelEmbeddingImpl::reset() {
  weight = register_parameter(
      "weight", torch::empty({tokens_.local_size(tokens_.comm->rank()), options.embedding_dim()}));
  reset_parameters();
}

void VocabParallelEmbeddingImpl::reset_parameters() {
  init_embedding(weight, tokens_, {options.seed(), options.init_std(), 1.0});
}

Tensor VocabParallelEmbeddingImpl::forward(const Tensor& tokens) {
  const auto& comm = options.communicator();
  TORCH_CHECK_VALUE(tokens.defined() && tokens.scalar_type() == torch::kLong, display_name(),
                    ": needs int64 tokens");
  TORCH_CHECK_VALUE(tokens.device() == weight.device(), display_name(), ": the tokens are on ",
                    tokens.device(), ", the weight on ", weight.device());
  check_tokens(tokens, options.num_embeddings(), {}, display_name(), "token");
  const VocabularyPart part(options.shard_sizes(), comm->rank());
  const auto local = tokens.reshape({-1}) - part.offset;
  const auto here = local.ge(0).logical_and_(local.lt(part.own)).nonzero().view(-1);
  const auto rows = torch::embedding(weight, local.index_select(0, here));
  const auto partial =
      torch::zeros({local.size(0), options.embedding_dim()}, weight.options().requires_grad(false))
          .index_copy(0, here, rows);
  const auto result =
      options.scatter_output()
          ? scatter_sum_columns(partial, options.out_shard_sizes(), comm, display_name())
          : reduce_from_ranks(partial, comm, display_name());
  auto shape = tokens.sizes().vec();
  shape.push_back(result.size(1));
  return result.reshape(shape);
}

Sharding VocabParallelEmbeddingImpl::sharding_of(const std::string& name) const {
  return name == "weight" ? tokens_ : Sharding();
}

void VocabParallelEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "VocabParallelEmbedding(" << options.num_embeddings() << ", "
         << options.embedding_dim() << ", tokens_local=" << weight.size(0)
         << ", scatter_output=" << options.scatter_output() << ")";
}

Tensor vocab_parallel_cross_entropy(const Tensor& logits, const Tensor& targets,
                                    const VocabParallelCrossEntropyOptions& options) {
  const auto comm = communicator_or_world(options.communicator(), options.name());
  check_entropy_input(logits, targets, options.name());
  const VocabularyPart part(class_shards(options, comm->size(), logits.size(-1)), comm->rank());
  TORCH_CHECK_VALUE(logits.size(-1) == part.own, options.name(), ": rank ", comm->rank(),
                    " has logits of ", part.own, " classes, got shape ", logits.sizes());
  check_tokens(targets, part.total, options.ignore_index(), options.name(), "target");
  auto call = c10::make_intrusive<EntropyCall>();
  call->comm = comm;
  call->name = options.name();
  call->offset = part.offset;
  call->own = part.own;
  call->ignore_index = options.ignore_index();
  return EntropyFunction::apply(logits, targets.reshape({-1}), call);
}

}  // namespace syncnorm
