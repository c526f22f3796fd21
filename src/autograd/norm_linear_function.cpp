#include "autograd/norm_linear_function.h"

#include <torch/torch.h>

#include "autograd/norm_function.h"
#include "syncnorm/collectives.h"

namespace syncnorm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

at::Tensor or_empty(const at::Tensor& values, const at::Tensor& like) {
  return values.defined() ? values : at::empty({0}, like.options().requires_grad(false));
}

/// `present` says what an empty tensor cannot: that of a shard of no columns.
at::Tensor unless_absent(const at::Tensor& values, bool present) {
  return present ? values : at::Tensor();
}

struct Inputs {
  at::Tensor x, norm_weight, norm_bias, weight, bias;
};

NormPart layout_part(const at::Tensor& x, const NormLinearCall& call) {
  NormPart part;
  part.eps = call.eps;
  part.layout = row_layout(x, call.hidden(), call.centered);
  return part;
}

at::Tensor plain_composition(const Inputs& in, const NormLinearCall& call) {
  auto norm = c10::make_intrusive<NormCall>();
  norm->comm = call.comm;
  norm->module = call.module;
  norm->parts = {layout_part(in.x, call)};
  NormTensors tensors;
  tensors.x = in.x;
  tensors.weight = in.norm_weight;
  tensors.bias = in.norm_bias;
  const auto u = normalize(tensors, norm).front();
  const auto whole = gather_columns(u, call.sizes, call.comm, call.module);
  return torch::linear(whole, in.weight, in.bias);
}

struct NormLinearFunction : torch::autograd::Function<NormLinearFunction> {
  static Variable forward(AutogradContext* ctx, const Variable& x, const Variable& norm_weight,
                          const Variable& norm_bias, const Variable& weight, const Variable& bias,
                          int64_t present, const c10::intrusive_ptr<NormLinearCall>& call) {
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    ctx->saved_data["present"] = present;
    const ModuleScope scope(call->module);
    auto rows = gather_normalized(x, unless_absent(norm_weight, present & 1),
                                  unless_absent(norm_bias, present & 2), *call, "forward");
    const auto u = rows.normalized.t();
    const auto y = present & 4 ? at::addmm(bias, u, weight.t()) : at::mm(u, weight.t());
    const bool keep = call->keep_gathered;
    ctx->save_for_backward({x, norm_weight, norm_bias, weight, bias, rows.statistics,
                            or_empty(keep ? rows.normalized : at::Tensor(), x),
                            or_empty(keep ? rows.weight : at::Tensor(), x),
                            or_empty(keep ? rows.bias : at::Tensor(), x)});
    return y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto call =
        c10::static_intrusive_pointer_cast<NormLinearCall>(ctx->saved_data["call"].toCapsule());
    const auto present = ctx->saved_data["present"].toInt();
    const auto saved = ctx->get_saved_variables();
    const ModuleScope scope(call->module);
    const Inputs in{saved[0], unless_absent(saved[1], present & 1),
                    unless_absent(saved[2], present & 2), saved[3],
                    unless_absent(saved[4], present & 4)};
    auto result = at::GradMode::is_enabled() ? differentiable(ctx, in, gradients[0], *call)
                                             : once(ctx, in, saved, gradients[0], *call);
    result.resize(7);
    return result;
  }

  static variable_list once(AutogradContext* ctx, const Inputs& in, const variable_list& saved,
                            const Variable& dy, const NormLinearCall& call) {
    GatheredRows rows;
    if (call.keep_gathered) {
      rows = {saved[6], saved[5], saved[7].numel() > 0 ? saved[7] : at::Tensor(),
              saved[8].numel() > 0 ? saved[8] : at::Tensor()};
    } else {
      rows = gather_normalized(in.x, in.norm_weight, in.norm_bias, call, "backward");
    }
    variable_list result(5);
    if (ctx->needs_input_grad(3)) result[3] = at::mm(dy.t(), rows.normalized.t());
    if (in.bias.defined() && ctx->needs_input_grad(4)) result[4] = dy.sum(0);
    const auto scattered = scatter_gradient(at::mm(in.weight.t(), dy.t()), rows, call);

    const auto part = layout_part(in.x, call);
    const auto& layout = part.layout;
    const kernels::Norm norm{NormInput(in.x, layout),
                             layout,
                             rows.statistics,
                             in.norm_weight,
                             in.norm_bias,
                             at::Tensor(),
                             false,
                             at::Tensor()};
    const auto du = norm.input.match(scattered.of_columns);
    const auto& kernels = kernels::kernels_for(du.device());
    const auto needs = [&](size_t i, const at::Tensor& parameter) {
      return parameter.defined() && ctx->needs_input_grad(i);
    };
    if (needs(1, in.norm_weight) || needs(2, in.norm_bias)) {
      const auto of_slots = at::empty_like(scattered.sums);
      const auto of_affine = at::empty(layout.affine_shape(), of_slots.options());
      kernels.backward_sums(norm, du, of_slots, of_affine);
      if (needs(1, in.norm_weight))
        result[1] = kernels.affine_gradient(of_affine, 1, in.norm_weight);
      if (needs(2, in.norm_bias)) result[2] = kernels.affine_gradient(of_affine, 0, in.norm_bias);
    }
    if (ctx->needs_input_grad(0)) {
      result[0] = norm.input.empty_like();
      kernels.backward_apply(norm, du, scattered.sums, layout.count, {result[0], {}, {}});
    }
    return result;
  }

  static variable_list differentiable(AutogradContext* ctx, const Inputs& in, const Variable& dy,
                                      const NormLinearCall& call) {
    const auto y = plain_composition(in, call);
    const std::vector<at::Tensor> all{in.x, in.norm_weight, in.norm_bias, in.weight, in.bias};
    variable_list wanted;
    for (size_t i = 0; i < all.size(); ++i)
      if (all[i].defined() && ctx->needs_input_grad(i)) wanted.push_back(all[i]);
    const auto found = torch::autograd::grad({y}, wanted, {dy}, /*retain_graph=*/true,
                                             /*create_graph=*/true, /*allow_unused=*/true);
    variable_list result(5);
    size_t next = 0;
    for (size_t i = 0; i < all.size(); ++i)
      if (all[i].defined() && ctx->needs_input_grad(i)) result[i] = found[next++];
    return result;
  }
};

}  // namespace

at::Tensor norm_linear(const at::Tensor& x, const at::Tensor& norm_weight,
                       const at::Tensor& norm_bias, const at::Tensor& weight,
                       const at::Tensor& bias, const c10::intrusive_ptr<NormLinearCall>& call) {
  const int64_t present =
      (norm_weight.defined() ? 1 : 0) | (norm_bias.defined() ? 2 : 0) | (bias.defined() ? 4 : 0);
  if (at::GradMode::is_enabled())
    for (const auto& input : {x, norm_weight, norm_bias, weight, bias})
      call->has_backward |= input.defined() && input.requires_grad();
  return NormLinearFunction::apply(x, or_empty(norm_weight, x), or_empty(norm_bias, x), weight,
                                   or_empty(bias, x), present, call);
}

}  // namespace syncnorm
