#include "autograd/norm_function.h"

#include <torch/csrc/autograd/custom_function.h>

#include "autograd/application.h"
#include "autograd/differentiable.h"

namespace syncnorm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// torch::autograd::Function takes defined tensors only; an empty one stands for an absent one.
at::Tensor or_placeholder(const at::Tensor& values, const at::Tensor& like) {
  return values.defined() ? values : at::empty({0}, like.options());
}

at::Tensor unless_placeholder(const at::Tensor& values) {
  return values.numel() > 0 ? values : at::Tensor();
}

struct NormFunction : torch::autograd::Function<NormFunction> {
  // `participation` only gives ranks whose other inputs need no gradient a place in the graph,
  // where others need theirs.
  static Variable forward(AutogradContext* ctx, const Variable& x, const Variable& weight,
                          const Variable& bias, const Variable& /*participation*/,
                          const Variable& mean, const Variable& rstd,
                          const c10::intrusive_ptr<NormCall>& call) {
    ctx->save_for_backward({x, weight, bias, mean, rstd});
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    const NormInput input(x, call->layout);
    return apply_forward(input, call->layout, weight, bias, mean, rstd).to(x.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto call =
        c10::static_intrusive_pointer_cast<NormCall>(ctx->saved_data["call"].toCapsule());
    const auto saved = ctx->get_saved_variables();
    const ModuleScope scope(call->module);
    auto result =
        at::GradMode::is_enabled()
            ? differentiable_backward(saved[0], unless_placeholder(saved[1]),
                                      unless_placeholder(saved[2]), gradients[0], saved[3], *call)
            : backward_once(ctx, saved, gradients[0], *call);
    result.resize(7);
    return result;
  }

  static variable_list backward_once(AutogradContext* ctx, const variable_list& saved,
                                     const Variable& gradient, const NormCall& call) {
    const auto& [x, weight, bias, mean, rstd] =
        std::tie(saved[0], saved[1], saved[2], saved[3], saved[4]);
    const auto& layout = call.layout;
    const NormInput input(x, layout);
    const auto dy = input.match(gradient);
    const Cells cells(layout, mean, rstd, dy.scalar_type());
    const Affine affine(weight, bias, input, layout);
    auto sums = backward_sums(input, layout, cells, affine, dy);
    const auto means = exchange(sums, call);

    variable_list result(3);
    if (ctx->needs_input_grad(1)) result[1] = gradient_of(weight, sums.of_affine[1]);
    if (ctx->needs_input_grad(2)) result[2] = gradient_of(bias, sums.of_affine[0]);
    if (ctx->needs_input_grad(0))
      result[0] = apply_backward(input, layout, cells, affine, dy, means).to(x.scalar_type());
    return result;
  }

  /// The means over all ranks that dx needs, undefined where no rank needs them. Where the layout
  /// asks for it, the sums of the affine parameters become those of all ranks, in the same
  /// collective.
  static at::Tensor exchange(LocalSums& sums, const NormCall& call) {
    const auto count = call.count.clamp_min(1);
    const auto& local = sums.of_slots;
    if (!call.layout.sum_affine_gradients)
      return call.reduce_backward ? exchange_sums(local, call.comm, "backward") / count
                                  : at::Tensor();
    const auto all = exchange_sums(at::cat({local.reshape({-1}), sums.of_affine.reshape({-1})}),
                                   call.comm, "backward with weight");
    sums.of_affine =
        all.narrow(0, local.numel(), sums.of_affine.numel()).view(sums.of_affine.sizes());
    return all.narrow(0, 0, local.numel()).view(local.sizes()) / count;
  }
};

}  // namespace

at::Tensor apply_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const Moments& moments, const c10::intrusive_ptr<NormCall>& call) {
  const auto wants = [](const at::Tensor& t) { return t.defined() && t.requires_grad(); };
  const bool joins = call->reduce_backward && !wants(x) && !wants(weight) && !wants(bias);
  const auto participation = at::zeros({}, x.options()).set_requires_grad(joins);
  return NormFunction::apply(x, or_placeholder(weight, x), or_placeholder(bias, x), participation,
                             moments.mean, (moments.variance + call->eps).rsqrt(), call);
}

at::Tensor normalize(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                     const c10::intrusive_ptr<NormCall>& call, const std::string& details) {
  MomentsRequest request;
  request.comm = call->comm;
  request.dtype = x.scalar_type();
  request.eps = call->eps;
  request.grad_mode = at::GradMode::is_enabled();
  request.wants_gradient = request.grad_mode && x.requires_grad();
  request.details = details;
  Moments moments;
  {
    const at::NoGradGuard no_grad;
    moments = exchange_moments(NormInput(x, call->layout), call->layout, {}, request);
  }
  call->count = moments.count;
  call->reduce_backward = moments.ranks_wanting_gradient > 0;
  return apply_norm(x, weight, bias, moments, call);
}

}  // namespace syncnorm
