#include "autograd/norm_function.h"

#include <torch/csrc/autograd/custom_function.h>

#include "autograd/differentiable.h"
#include "autograd/input.h"

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

at::Tensor per_slot_or(const at::Tensor& values, double fallback, const at::Tensor& like) {
  return values.numel() > 0 ? values.detach().to(like.options()) : at::full_like(like, fallback);
}

/// The part of `mean` that the dtype of computation holds: subtracting it first costs x no digits,
/// the small rest goes into the shift.
at::Tensor representable(const at::Tensor& mean, const ChannelInput& input) {
  return mean.to(input.data.scalar_type()).to(at::kDouble);
}

at::Tensor normalize(const ChannelInput& input, const at::Tensor& weight, const at::Tensor& bias,
                     const at::Tensor& mean, const at::Tensor& rstd) {
  const auto center = representable(mean, input);
  const auto scale = per_slot_or(weight, 1, rstd) * rstd;
  const auto shift = per_slot_or(bias, 0, rstd) - (mean - center) * scale;
  auto y = at::empty_like(input.data, input.data.options(), input.format);
  kernels::kernels_for(y.device())
      .apply(input.data, input.layout, at::stack({center, scale, shift}).to(y.scalar_type()), y);
  return y;
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
    return normalize(ChannelInput(x), weight, bias, mean, rstd).to(x.scalar_type());
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
    const ChannelInput input(x);
    const auto dy = input.match(gradient);
    const auto center = representable(mean, input);
    const auto& kernels = kernels::kernels_for(dy.device());
    const auto local = kernels.backward_sums(input.data, dy, input.layout, center);
    // From sum(dy * (x - center)) to sum(dy * xhat).
    local[1].sub_((mean - center) * local[0]).mul_(rstd);

    variable_list result(3);
    if (ctx->needs_input_grad(1)) result[1] = local[1].to(weight.scalar_type());
    if (ctx->needs_input_grad(2)) result[2] = local[0].to(bias.scalar_type());
    if (!call.reduce_backward) return result;
    const auto means = exchange_sums(local, call.comm, "backward") / call.count;
    if (!ctx->needs_input_grad(0)) return result;

    const auto a = per_slot_or(weight, 1, rstd) * rstd;
    const auto b = -a * rstd * means[1];
    const auto c = b * (center - mean) - a * means[0];
    auto dx = at::empty_like(input.data, input.data.options(), input.format);
    kernels.backward_apply(input.data, dy, input.layout,
                           at::stack({center, a, b, c}).to(dx.scalar_type()), dx);
    result[0] = dx.to(x.scalar_type());
    return result;
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

}  // namespace syncnorm
