#include "syncnorm/collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>

#include <numeric>

namespace syncnorm {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// What one call fixes for its forward, its backward and those of higher order.
struct Call : torch::CustomClassHolder {
  std::shared_ptr<Communicator> comm;
  std::string name;
  std::vector<int64_t> sizes;  // columns by rank
  Sharding sharding;           // of sum_shared_gradient

  int64_t offset() const {
    return std::accumulate(sizes.begin(), sizes.begin() + comm->rank(), int64_t{0});
  }
  int64_t own() const { return sizes[comm->rank()]; }
  int64_t total() const { return std::accumulate(sizes.begin(), sizes.end(), int64_t{0}); }
};

enum class Step : int64_t { keep, sum, gather, scatter_sum, take, sum_shared };

/// [..., C] as [C, rows] with contiguous rows, the communicator's order; copied only where it is
/// not laid out so already.
Tensor columns_first(const Tensor& x) {
  const int64_t columns = x.size(-1);
  const int64_t rows = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  return x.reshape({rows, columns}).t().contiguous();
}

/// Back from [C, rows] to the leading dimensions of `like`.
Tensor columns_last(const Tensor& x, const Tensor& like) {
  auto shape = like.sizes().vec();
  shape.pop_back();
  shape.insert(shape.begin(), x.size(0));
  return x.view(shape).movedim(0, -1);
}

Tensor index_of(const std::vector<Range>& ranges) {
  std::vector<Tensor> parts = {torch::empty({0}, torch::kLong)};
  for (const auto& range : ranges)
    parts.push_back(torch::arange(range.offset, range.offset + range.size, torch::kLong));
  return torch::cat(parts);
}

Tensor sum_shared_positions(const Tensor& x, const Sharding& sharding) {
  const auto shared = sharding.shared_ranges();
  // Place of each position of the whole in the buffer of the shared ones, -1 for the others.
  auto place = torch::full({sharding.extent}, -1, torch::kLong);
  const auto positions = index_of(shared);
  place.index_copy_(0, positions, torch::arange(positions.size(0), torch::kLong));
  const auto own = place.index_select(0, index_of(sharding.ranges[sharding.comm->rank()]));
  const auto here = own.ge(0).nonzero().view(-1).to(x.device());
  const auto there = own.masked_select(own.ge(0)).to(x.device());

  auto shape = x.sizes().vec();
  shape[sharding.dim] = positions.size(0);
  auto buffer = torch::zeros(shape, x.options());
  buffer.index_copy_(sharding.dim, there, x.index_select(sharding.dim, here));
  sharding.comm->all_reduce(buffer);
  return x.index_copy(sharding.dim, here, buffer.index_select(sharding.dim, there));
}

Tensor perform(Step step, const Tensor& x, const Call& call) {
  switch (step) {
    case Step::sum: {
      auto result = x.clone(at::MemoryFormat::Contiguous);
      call.comm->all_reduce(result);
      return result;
    }
    case Step::gather:
      return columns_last(call.comm->all_gather(columns_first(x), call.sizes), x);
    case Step::scatter_sum:
      return columns_last(call.comm->reduce_scatter(columns_first(x), call.sizes), x);
    case Step::take:
      return x.narrow(-1, call.offset(), call.own()).clone(at::MemoryFormat::Contiguous);
    case Step::sum_shared:
      return sum_shared_positions(x, call.sharding);
    default:
      return x;
  }
}

struct CollectiveFunction : torch::autograd::Function<CollectiveFunction> {
  static Variable forward(AutogradContext* ctx, const Variable& x,
                          const c10::intrusive_ptr<Call>& call, Step step, Step conjugate) {
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    ctx->saved_data["step"] = static_cast<int64_t>(step);
    ctx->saved_data["conjugate"] = static_cast<int64_t>(conjugate);
    if (step == Step::keep) return x;
    const ModuleScope scope(call->name);
    // Results own their memory: that they are transposed views of it is nothing autograd should
    // see.
    const at::AutoDispatchBelowADInplaceOrView untracked;
    return perform(step, x, *call);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto call = c10::static_intrusive_pointer_cast<Call>(ctx->saved_data["call"].toCapsule());
    const auto step = static_cast<Step>(ctx->saved_data["step"].toInt());
    const auto conjugate = static_cast<Step>(ctx->saved_data["conjugate"].toInt());
    return {apply(gradients[0], call, conjugate, step), {}, {}, {}};
  }
};

c10::intrusive_ptr<Call> new_call(const Tensor& x, const std::shared_ptr<Communicator>& comm,
                                  const std::string& name) {
  TORCH_CHECK_VALUE(x.defined(), name, ": the tensor is undefined.");
  TORCH_CHECK_VALUE(comm != nullptr, name, ": the communicator is null.");
  auto call = c10::make_intrusive<Call>();
  call->comm = comm;
  call->name = name;
  return call;
}

/// `whole`: the input has all columns, otherwise those of this rank.
c10::intrusive_ptr<Call> new_column_call(const Tensor& x, const std::vector<int64_t>& sizes,
                                         bool whole, const std::shared_ptr<Communicator>& comm,
                                         const std::string& name) {
  auto call = new_call(x, comm, name);
  TORCH_CHECK_VALUE(static_cast<int>(sizes.size()) == comm->size(), name,
                    ": one number of columns for each of ", comm->size(), " ranks is needed, got ",
                    at::IntArrayRef(sizes), ".");
  for (const int64_t size : sizes)
    TORCH_CHECK_VALUE(size >= 0, name,
                      ": numbers of columns cannot be negative: ", at::IntArrayRef(sizes), ".");
  call->sizes = sizes;
  const int64_t expected = whole ? call->total() : call->own();
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == expected, name, ": rank ", comm->rank(),
                    " needs an input with ", expected, " columns in the last dimension (",
                    whole ? "all" : "its own", " of ", at::IntArrayRef(sizes),
                    " by rank), got shape ", x.sizes(), ".");
  return call;
}

}  // namespace

Tensor copy_to_ranks(const Tensor& x, const std::shared_ptr<Communicator>& comm,
                     const std::string& name) {
  return CollectiveFunction::apply(x, new_call(x, comm, name), Step::keep, Step::sum);
}

Tensor reduce_from_ranks(const Tensor& x, const std::shared_ptr<Communicator>& comm,
                         const std::string& name) {
  return CollectiveFunction::apply(x, new_call(x, comm, name), Step::sum, Step::keep);
}

Tensor gather_columns(const Tensor& x, const std::vector<int64_t>& sizes,
                      const std::shared_ptr<Communicator>& comm, const std::string& name) {
  return CollectiveFunction::apply(x, new_column_call(x, sizes, false, comm, name), Step::gather,
                                   Step::scatter_sum);
}

Tensor scatter_sum_columns(const Tensor& x, const std::vector<int64_t>& sizes,
                           const std::shared_ptr<Communicator>& comm, const std::string& name) {
  return CollectiveFunction::apply(x, new_column_call(x, sizes, true, comm, name),
                                   Step::scatter_sum, Step::gather);
}

Tensor take_columns(const Tensor& x, const std::vector<int64_t>& sizes,
                    const std::shared_ptr<Communicator>& comm, const std::string& name) {
  return CollectiveFunction::apply(x, new_column_call(x, sizes, true, comm, name), Step::take,
                                   Step::gather);
}

Tensor gather_replicated_columns(const Tensor& x, const std::vector<int64_t>& sizes,
                                 const std::shared_ptr<Communicator>& comm,
                                 const std::string& name) {
  return CollectiveFunction::apply(x, new_column_call(x, sizes, false, comm, name), Step::gather,
                                   Step::take);
}

Tensor sum_shared_gradient(const Tensor& parameter, const Sharding& sharding,
                           const std::string& name) {
  if (sharding.shared_ranges().empty()) return parameter;
  auto call = new_call(parameter, sharding.comm, name);
  TORCH_CHECK_VALUE(parameter.dim() > sharding.dim &&
                        parameter.size(sharding.dim) == sharding.local_size(sharding.comm->rank()),
                    name, ": a shard of ", sharding.local_size(sharding.comm->rank()),
                    " along dimension ", sharding.dim, " is needed, got ", parameter.sizes(), ".");
  call->sharding = sharding;
  return CollectiveFunction::apply(parameter, call, Step::keep, Step::sum_shared);
}

Tensor sum_gradient(const Tensor& parameter, const std::shared_ptr<Communicator>& comm,
                    const std::string& name) {
  return copy_to_ranks(parameter, comm, name);
}

}  // namespace syncnorm
