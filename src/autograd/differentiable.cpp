#include "autograd/differentiable.h"

#include <string>
#include <vector>

namespace syncnorm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

/// `sum` in the shape and dtype of the parameter whose gradient it is.
at::Tensor gradient_of(const at::Tensor& parameter, const at::Tensor& sum) {
  return sum.reshape(parameter.sizes()).to(parameter.scalar_type());
}

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
                                      const at::Tensor& mean, const NormPart& part,
                                      const NormCall& call) {
  const auto shared_call = c10::make_intrusive<NormCall>(call);
  const auto& layout = part.layout;
  const auto count = part.count.divisor(mean);
  const std::vector<int64_t> shape{layout.cells.outer, layout.cells.cells, layout.cells.inner};
  const auto over = [](const at::Tensor& of_cells) { return of_cells.view({1, -1, 1}); };
  const auto sum_cells = [&](const at::Tensor& values) {
    return values.sum(at::IntArrayRef{0, 2});
  };
  const auto counted = [&](const at::Tensor& of_cells) {
    return layout.share.defined() ? of_cells * layout.share : of_cells;
  };
  const auto suffix = part.label.empty() ? "" : " of " + part.label;
  const auto average = [&](const std::vector<at::Tensor>& sums, const char* pass) {
    return AllReduceSum::sum_over_ranks(layout.to_slots(at::stack(sums)), shared_call,
                                        pass + suffix) /
           count;
  };

  const auto center = layout.to_cells(mean);
  const auto shifted = x.to(at::kDouble).reshape(shape) - over(center);
  const auto gradient = dy.to(at::kDouble).reshape(shape);
  std::vector<at::Tensor> sums;
  if (layout.centered) sums.push_back(counted(sum_cells(shifted)));
  sums.push_back(counted(sum_cells(shifted * shifted)));
  const auto moments = average(sums, "statistics again");
  const auto offset = layout.centered ? moments[0] : at::zeros_like(mean);
  const auto variance = moments[moments.size(0) - 1] - offset * offset;
  const auto rstd = layout.to_cells((variance + part.eps).rsqrt());
  const auto normalized = (shifted - over(layout.to_cells(offset))) * over(rstd);

  variable_list result(3);
  const auto product = gradient * normalized;
  auto of_affine = at::stack({layout.sum_affine(gradient), layout.sum_affine(product)});
  if (layout.sum_affine_gradients)
    of_affine = AllReduceSum::sum_over_ranks(of_affine, shared_call, "weight gradient" + suffix);
  if (weight.defined()) result[1] = gradient_of(weight, of_affine[1]);
  if (bias.defined()) result[2] = gradient_of(bias, of_affine[0]);
  if (!call.reduce_backward) return result;

  const auto spread =
      weight.defined() ? layout.spread_affine(weight.to(at::kDouble)) : at::Tensor();
  const auto weighted = [&](const at::Tensor& values) {
    return spread.defined() ? values * spread : values;
  };
  std::vector<at::Tensor> local;
  if (layout.centered) local.push_back(sum_cells(weighted(gradient)));
  local.push_back(sum_cells(weighted(product)));
  const auto means = average(local, "gradient sums");
  auto correction = normalized * over(counted(layout.to_cells(means[means.size(0) - 1])));
  if (layout.centered) correction = correction + over(counted(layout.to_cells(means[0])));
  result[0] =
      (over(rstd) * (weighted(gradient) - correction)).reshape(x.sizes()).to(x.scalar_type());
  return result;
}

}  // namespace syncnorm
