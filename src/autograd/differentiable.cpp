#include "autograd/differentiable.h"

#include <algorithm>
#include <string>
#include <vector>

namespace syncnorm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// Sum over all ranks, the same on each; its gradient is the sum of all ranks' gradients, by the
/// same function.
struct AllReduceSum : torch::autograd::Function<AllReduceSum> {
  static Variable forward(AutogradContext* ctx, const Variable& local,
                          const Variable& /*participation*/,
                          const c10::intrusive_ptr<NormCall>& call, const std::string& pass) {
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    ctx->saved_data["pass"] = pass;
    const ModuleScope scope(call->module);
    return exchange_sums(local.detach(), call->comm, pass.c_str());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto call =
        c10::static_intrusive_pointer_cast<NormCall>(ctx->saved_data["call"].toCapsule());
    const auto pass = "backward of " + ctx->saved_data["pass"].toStringRef();
    return {sum_over_ranks(gradients[0], call, pass), Variable(), Variable(), Variable()};
  }

  // Every rank gets a node, also one whose `local` needs no gradient: the others' backward waits
  // for it.
  // `pass` tells the sums of one derivative apart, should ranks run them in another order.
  static Variable sum_over_ranks(const Variable& local, const c10::intrusive_ptr<NormCall>& call,
                                 const std::string& pass) {
    const auto participation = at::zeros({}, local.options()).set_requires_grad(true);
    return apply(local, participation, call, pass);
  }
};

}  // namespace

variable_list differentiable_backward(const at::Tensor& x, const at::Tensor& weight,
                                      const at::Tensor& bias, const at::Tensor& dy,
                                      const at::Tensor& mean, const NormCall& call) {
  const auto shared_call = c10::make_intrusive<NormCall>(call);
  const double count = std::max(call.count, 1.0);  // no values: sums of nothing stay zero, not NaN
  std::vector<int64_t> reduced;
  std::vector<int64_t> broadcast(x.dim(), 1);
  for (int64_t d = 0; d < x.dim(); ++d)
    if (d != 1) reduced.push_back(d);
  broadcast[1] = x.size(1);
  const auto slots = [&](const at::Tensor& values) { return values.reshape(broadcast); };
  const auto sums = [&](const at::Tensor& first, const at::Tensor& second) {
    return at::stack({first.sum(reduced), second.sum(reduced)});
  };

  const auto shifted = x.to(at::kDouble) - slots(mean);
  const auto gradient = dy.to(at::kDouble);
  const auto moments = AllReduceSum::sum_over_ranks(sums(shifted, shifted * shifted), shared_call,
                                                    "statistics again") /
                       count;
  const auto rstd = (moments[1] - moments[0] * moments[0] + call.eps).rsqrt();
  const auto normalized = (shifted - slots(moments[0])) * slots(rstd);
  const auto local = sums(gradient, gradient * normalized);

  variable_list result(3);
  if (weight.defined()) result[1] = local[1].to(weight.scalar_type());
  if (bias.defined()) result[2] = local[0].to(bias.scalar_type());
  if (!call.reduce_backward) return result;
  const auto means = AllReduceSum::sum_over_ranks(local, shared_call, "gradient sums") / count;
  const auto scale = weight.defined() ? rstd * weight.to(at::kDouble) : rstd;
  result[0] = (slots(scale) * (gradient - slots(means[0]) - normalized * slots(means[1])))
                  .to(x.scalar_type());
  return result;
}

}  // namespace syncnorm
