#include "autograd/norm_function.h"

#include <torch/csrc/autograd/custom_function.h>

#include <limits>

#include "autograd/differentiable.h"
#include "autograd/verdicts.h"
#include "comm/doubles.h"
#include "comm/signature.h"
#include "comm/statistics_buffer.h"

namespace syncnorm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// torch::autograd::Function takes defined tensors only; an empty one stands for an absent one.
const at::Tensor& placeholder() {
  static const at::Tensor empty = [] {
    const c10::InferenceMode off(false);  // a tensor of inference mode could not be saved later
    return at::empty({0});
  }();
  return empty;
}

at::Tensor or_placeholder(const at::Tensor& values) {
  return values.defined() ? values : placeholder();
}

/// A shard of no columns has empty parameters of its own, which are not the placeholder.
at::Tensor unless_placeholder(const at::Tensor& values) {
  return values.is_same(placeholder()) ? at::Tensor() : values;
}

/// Inputs of the function for each part, and what it keeps of each.
enum Input : size_t { kX, kWeight, kBias, kResidual, kInputs };
enum Saved : size_t { kSavedX, kSavedWeight, kSavedBias, kStatistics, kOutput, kSavedTensors };

/// Fresh memory for the sums of one part; where the host does not wait for them also the gradients
/// of bias and weight, and how to tell what the exchange came to.
struct PartSums {
  at::Tensor of_slots, of_affine, dbias, dweight;
  kernels::Outcome outcome;
  std::string exchange;  ///< empty where there was none
};

/// What backward knows of one part.
struct PartBackward {
  const NormPart& part;
  at::Tensor x, weight, bias, statistics, output;
  at::Tensor dy, dsum;

  kernels::Norm norm() const {
    return {NormInput(x, part.layout),
            part.layout,
            statistics,
            weight,
            bias,
            at::Tensor(),
            part.relu,
            output};
  }
};

struct NormFunction : torch::autograd::Function<NormFunction> {
  // Beside those of the parts, a last input only gives ranks whose own inputs need no gradient a
  // place in the graph, where others need theirs.
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs,
                               at::TensorList statistics,
                               const c10::intrusive_ptr<NormCall>& call) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    call->inputs = inputs.size() + statistics.size();
    variable_list outputs, saved;
    for (size_t p = 0; p < call->parts.size(); ++p) {
      auto& part = call->parts[p];
      const auto* in = inputs.data() + p * kInputs;
      const bool before = part.sum.defined();
      const auto residual = before ? at::Tensor() : unless_placeholder(in[kResidual]);
      const kernels::Norm norm{*part.input,
                               part.layout,
                               statistics[p],
                               unless_placeholder(in[kWeight]),
                               unless_placeholder(in[kBias]),
                               residual.defined() ? part.input->match(residual) : at::Tensor(),
                               part.relu,
                               at::Tensor()};
      const auto y = part.input->empty_like();
      const auto& kernels = kernels::kernels_for(y.device());
      if (part.arriving == nullptr) {
        kernels.apply(norm, y);
      } else {  // the verdict is opened just before the kernel that writes it
        const auto& deferred = *kernels.deferred();
        part.arriving->outcome.verdict =
            Verdicts::open(call->comm, part.arriving->exchange, call->module, y.device(),
                           deferred.capturing(y.device()));
        deferred.finish_and_apply(norm, *part.arriving, y);
      }
      outputs.push_back(y);
      if (before) outputs.push_back(part.sum);
      const bool keeps_output = part.relu && residual.defined();
      for (const auto& tensor : {before ? part.sum : in[kX], in[kWeight], in[kBias], statistics[p],
                                 keeps_output ? y : placeholder()})
        saved.push_back(tensor);
      part.input.reset();
      part.sum.reset();
      part.arriving.reset();
    }
    ctx->save_for_backward(std::move(saved));
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto call =
        c10::static_intrusive_pointer_cast<NormCall>(ctx->saved_data["call"].toCapsule());
    const auto saved = ctx->get_saved_variables();
    const ModuleScope scope(call->module);
    std::vector<PartBackward> parts;
    size_t next = 0;
    for (size_t p = 0; p < call->parts.size(); ++p) {
      const auto* of = saved.data() + p * kSavedTensors;
      parts.push_back({call->parts[p], of[kSavedX], unless_placeholder(of[kSavedWeight]),
                       unless_placeholder(of[kSavedBias]), of[kStatistics],
                       unless_placeholder(of[kOutput]), gradients[next++], at::Tensor()});
      auto& part = parts.back();
      if (!part.dy.defined()) part.dy = at::zeros_like(part.x);
      if (part.part.sums_first) part.dsum = gradients[next++];
    }
    auto result =
        at::GradMode::is_enabled() ? differentiable(ctx, parts, *call) : once(ctx, parts, *call);
    result.resize(call->inputs + 1);
    return result;
  }

  static bool needs(AutogradContext* ctx, size_t part, Input input) {
    return ctx->needs_input_grad(part * kInputs + input);
  }

  static variable_list differentiable(AutogradContext* ctx, const std::vector<PartBackward>& parts,
                                      const NormCall& call) {
    variable_list result;
    for (size_t p = 0; p < parts.size(); ++p) {
      const auto& of = parts[p];
      auto dy = of.dy;
      if (of.part.relu) dy = dy.masked_fill(output_of(of) <= 0, 0);
      auto own = differentiable_backward(of.x, of.weight, of.bias, dy,
                                         of.statistics[kernels::kMean], of.part, call);
      if (own[0].defined() && of.dsum.defined()) own[0] = own[0] + of.dsum;
      own.push_back(needs(ctx, p, kResidual) ? (of.part.sums_first ? own[0] : dy) : at::Tensor());
      result.insert(result.end(), own.begin(), own.end());
    }
    return result;
  }

  /// Whose sign says what the activation let through.
  static at::Tensor output_of(const PartBackward& of) {
    if (of.output.defined()) return of.output;
    const at::NoGradGuard no_grad;
    const auto norm = of.norm();
    auto y = norm.input.empty_like();
    kernels::kernels_for(y.device()).apply(norm, y);
    return y;
  }

  static variable_list once(AutogradContext* ctx, const std::vector<PartBackward>& parts,
                            const NormCall& call) {
    std::vector<kernels::Norm> norms;
    std::vector<at::Tensor> gradients;
    for (const auto& part : parts) {
      norms.push_back(part.norm());
      gradients.push_back(norms.back().input.match(part.dy));
    }
    auto sums = local_sums(ctx, norms, gradients, call);
    variable_list result;
    for (size_t p = 0; p < parts.size(); ++p) {
      const auto& of = parts[p];
      const bool first = of.part.sums_first;
      const bool needs_residual = needs(ctx, p, kResidual);
      const bool needs_x = needs(ctx, p, kX) || (first && needs_residual);
      const bool writes_residual = needs_residual && !first && of.part.relu;
      const auto& kernels = kernels::kernels_for(of.x.device());
      kernels::BackwardOutputs outputs;
      if (needs_x) outputs.dx = norms[p].input.empty_like();
      if (writes_residual) outputs.dresidual = norms[p].input.empty_like();
      if (of.dsum.defined()) outputs.extra = norms[p].input.match(of.dsum);
      const bool writes = needs_x || writes_residual;
      if (call.deferred && (writes || !sums[p].exchange.empty())) {  // if only for the verdict
        open_verdict(sums[p], call, of.x.device());
        kernels.deferred()->backward_apply(norms[p], gradients[p], sums[p].of_slots, of.part.count,
                                           outputs, sums[p].outcome);
      } else if (writes) {
        kernels.backward_apply(norms[p], gradients[p], sums[p].of_slots, of.part.count, outputs);
      }
      if (call.deferred && of.part.layout.sum_affine_gradients) spoil_unless_agreed(sums[p]);
      const auto affine = [&](Input input, const at::Tensor& parameter, int64_t row) {
        if (!needs(ctx, p, input)) return at::Tensor();
        const auto& written = row == 0 ? sums[p].dbias : sums[p].dweight;
        return written.defined() ? written
                                 : kernels.affine_gradient(sums[p].of_affine, row, parameter);
      };
      result.push_back(needs(ctx, p, kX) ? outputs.dx : at::Tensor());
      result.push_back(affine(kWeight, of.weight, 1));
      result.push_back(affine(kBias, of.bias, 0));
      result.push_back(!needs_residual ? at::Tensor()
                       : first         ? outputs.dx
                                       : (writes_residual ? outputs.dresidual : of.dy));
    }
    return result;
  }

  /// The sums of every part: of all ranks where some rank's input needs them, and those of the
  /// affine parameters where the layout asks for it, in one collective.
  static std::vector<PartSums> local_sums(AutogradContext* ctx,
                                          const std::vector<kernels::Norm>& norms,
                                          const std::vector<at::Tensor>& gradients,
                                          const NormCall& call) {
    int64_t words = 0;
    bool sums_affine = false;
    for (const auto& norm : norms) {
      words += norm.layout.sums() * norm.layout.slots;
      if (!norm.layout.sum_affine_gradients) continue;
      words += c10::multiply_integers(norm.layout.affine_shape());
      sums_affine = true;
    }
    auto details = Signature()
                       .add("pass", sums_affine ? "backward with weight" : "backward")
                       .add("words", words)
                       .text();
    StatisticsBuffer buffer(call.comm, words, gradients.front().device());
    if (call.deferred) Verdicts::raise_found(call.comm);
    const double tag = call.deferred ? buffer.begin(details) : 0;
    std::vector<PartSums> sums;
    int64_t at = 0;
    for (size_t p = 0; p < norms.size(); ++p) {
      sums.push_back(memory_for_sums(ctx, p, norms[p], call, buffer, &at));
      sum_locally(norms[p], gradients[p], sums[p], call, buffer, p == 0, tag);
    }
    if (!call.reduce_backward && !sums_affine) return sums;
    if (!call.deferred) {
      buffer.exchange(std::move(details));
      return sums;
    }
    buffer.travel();
    for (auto& part : sums) {
      part.exchange = buffer.describe();
      part.outcome.tags = buffer.front(StatisticsBuffer::kTagWords);
      part.outcome.tag = tag;
      part.outcome.ranks = call.comm->size();
    }
    return sums;
  }

  /// Where the sums of part p go; those that travel from word *at of the buffer.
  static PartSums memory_for_sums(AutogradContext* ctx, size_t p, const kernels::Norm& norm,
                                  const NormCall& call, const StatisticsBuffer& buffer,
                                  int64_t* at) {
    const auto& layout = norm.layout;
    const auto take = [&](at::IntArrayRef shape) {
      const int64_t start = *at;
      *at += c10::multiply_integers(shape);
      return buffer.words(start, shape);
    };
    const bool needs_weight = needs(ctx, p, kWeight), needs_bias = needs(ctx, p, kBias);
    PartSums part;
    part.of_slots = take({layout.sums(), layout.slots});
    if (layout.sum_affine_gradients) {
      part.of_affine = take(layout.affine_shape());
    } else if (call.deferred) {
      if (needs_weight) part.dweight = empty_like(norm.weight);
      if (needs_bias) part.dbias = empty_like(norm.bias);
    } else if (needs_weight || needs_bias) {
      part.of_affine = empty_doubles(layout.affine_shape(), part.of_slots.device());
    }
    return part;
  }

  static void sum_locally(const kernels::Norm& norm, const at::Tensor& dy, const PartSums& part,
                          const NormCall& call, const StatisticsBuffer& buffer, bool first,
                          double tag) {
    const auto& kernels = kernels::kernels_for(dy.device());
    if (!call.deferred) return kernels.backward_sums(norm, dy, part.of_slots, part.of_affine);
    kernels::Front front;
    if (first) front = {buffer.front(StatisticsBuffer::kTagWords), {tag, tag * tag}, {}};
    kernels.deferred()->backward_sums(norm, dy, part.of_slots, part.of_affine, part.dbias,
                                      part.dweight, front);
  }

  /// NaN instead of sums over ranks that meant different things.
  static void spoil_unless_agreed(const PartSums& part) {
    const auto& outcome = part.outcome;
    const double sum = outcome.ranks * outcome.tag;
    const auto differ = outcome.tags[0].ne(sum).logical_or(outcome.tags[1].ne(sum * outcome.tag));
    part.of_affine.masked_fill_(differ, std::numeric_limits<double>::quiet_NaN());
  }

  /// Just before the kernel that writes it: a word that none writes would be waited for.
  static void open_verdict(PartSums& part, const NormCall& call, c10::Device device) {
    if (part.exchange.empty()) return;
    const bool kept = kernels::kernels_for(device).deferred()->capturing(device);
    part.outcome.verdict = Verdicts::open(call.comm, part.exchange, call.module, device, kept);
  }

  static at::Tensor empty_like(const at::Tensor& parameter) {
    return at::empty(parameter.sizes(), parameter.options());
  }
};

}  // namespace

std::vector<Moments> exchange_statistics(const std::vector<NormTensors>& norms, NormCall& call) {
  const bool grad_mode = at::GradMode::is_enabled();
  const at::NoGradGuard no_grad;
  std::vector<MomentsRequest> requests;
  for (size_t p = 0; p < norms.size(); ++p) {
    const auto& norm = norms[p];
    auto& part = call.parts[p];
    const bool before = norm.place == ResidualPlace::before;
    part.input.emplace(norm.x, part.layout);
    at::Tensor term, residual;
    if (before) {
      term = part.input->data;
      residual = part.input->match(norm.residual);
      part.sums_first = true;
      part.sum = part.input->data = part.input->empty_like();
    }
    const bool wants = norm.x.requires_grad() || (before && norm.residual.requires_grad());
    requests.push_back({*part.input, part.layout, norm.x.scalar_type(), part.eps, norm.running_mean,
                        grad_mode && wants, grad_mode, norm.keeps_variance, norm.details, term,
                        residual, part.label, at::Tensor()});
  }
  auto moments = exchange_moments(requests, call.comm);
  for (size_t p = 0; p < norms.size(); ++p) {
    call.parts[p].count = moments[p].count;
    call.parts[p].arriving = moments[p].arriving;
    call.deferred = moments[p].arriving != nullptr;
    call.reduce_backward |= moments[p].ranks_wanting_gradient > 0;
  }
  return moments;
}

std::vector<at::Tensor> apply_norms(const std::vector<NormTensors>& norms,
                                    const std::vector<Moments>& moments,
                                    const c10::intrusive_ptr<NormCall>& call) {
  variable_list inputs, statistics;
  bool own_gradient = false;
  for (size_t p = 0; p < norms.size(); ++p) {
    const auto& norm = norms[p];
    for (const auto& tensor : {norm.x, norm.weight, norm.bias, norm.residual}) {
      inputs.push_back(or_placeholder(tensor));
      own_gradient |= inputs.back().requires_grad();
    }
    statistics.push_back(moments[p].statistics);
  }
  if (call->reduce_backward && !own_gradient)
    inputs.push_back(at::zeros({}, norms.front().x.options()).set_requires_grad(true));
  return NormFunction::apply(at::TensorList(inputs), at::TensorList(statistics), call);
}

std::vector<at::Tensor> normalize(const NormTensors& norm,
                                  const c10::intrusive_ptr<NormCall>& call) {
  const std::vector<NormTensors> norms{norm};
  return apply_norms(norms, exchange_statistics(norms, *call), call);
}

}  // namespace syncnorm
