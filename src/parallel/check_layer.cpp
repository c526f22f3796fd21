#include "syncnorm/check_layer.h"

#include <cmath>
#include <iomanip>
#include <limits>
#include <map>
#include <sstream>

namespace syncnorm {
namespace {

using torch::Tensor;

struct Result {
  Tensor output, input_gradient;
  std::map<std::string, Tensor> gradients;
  Counters forward, backward;
};

double default_tolerance(torch::ScalarType dtype) {
  return dtype == torch::kDouble ? 64 : dtype == torch::kFloat ? 16 : 2;
}

/// Distance of neighbouring numbers of `dtype` at the largest magnitude of `values`.
double ulp_of(const Tensor& values, torch::ScalarType dtype) {
  const int digits = dtype == torch::kDouble  ? 52
                     : dtype == torch::kFloat ? 23
                     : dtype == torch::kHalf  ? 10
                                              : 7;
  const double largest = values.numel() > 0 ? values.abs().max().item<double>() : 0;
  return std::isfinite(largest) && largest > 0 ? std::ldexp(1.0, std::ilogb(largest) - digits)
                                               : std::ldexp(1.0, -digits);
}

/// Largest error in ULPs of the reference's largest value, infinite where anything is not finite.
double error_in_ulps(const Tensor& values, const Tensor& exact, double ulp) {
  if (exact.numel() == 0) return 0;
  const double error =
      (values.detach().to(torch::kDouble) - exact.detach()).abs().max().item<double>();
  return std::isfinite(error) ? error / ulp : std::numeric_limits<double>::infinity();
}

Sharding cut_of(const std::function<Sharding(const std::shared_ptr<Communicator>&)>& cut,
                const std::shared_ptr<Communicator>& comm) {
  return cut ? cut(comm) : Sharding();
}

/// The parameters of `layer` with their cut.
std::vector<ShardedTensor> parameters_of(const LayerCheck& check, const torch::nn::Module& layer,
                                         const std::shared_ptr<Communicator>& comm) {
  auto parameters = sharded_tensors(layer, /*buffers=*/false);
  for (auto& parameter : parameters) {
    if (check.parameter_sharding && parameter.sharding.replicated())
      parameter.sharding = check.parameter_sharding(parameter.name, comm);
  }
  return parameters;
}

/// The whole layer's initial values, rank 0's on every rank: a layer may draw them as it likes.
std::map<std::string, Tensor> whole_parameters(const LayerCheck& check, Communicator& comm) {
  torch::manual_seed(check.seed);
  const auto layer = check.make(self_communicator());
  TORCH_CHECK_VALUE(layer != nullptr, check.name, ": make returned no module");
  torch::manual_seed(check.seed);
  std::map<std::string, Tensor> values;
  for (const auto& item : layer->named_parameters()) {
    auto value = item.value().detach().to(torch::kDouble);
    if (value.dim() <= 1) value = value + torch::randn_like(value) * 0.1;
    value = value.to(check.dtype).to(torch::kDouble).contiguous();  // what both can hold
    comm.broadcast(value, 0);
    values[item.key()] = value;
  }
  return values;
}

/// Fills the layer from the whole parameters, checking that they fit.
void fill(const LayerCheck& check, std::vector<ShardedTensor>& parameters,
          const std::map<std::string, Tensor>& whole) {
  const torch::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(parameters.size() == whole.size(), check.name, ": the layer over ranks has ",
                    parameters.size(), " parameters, the whole layer ", whole.size());
  for (auto& parameter : parameters) {
    const auto found = whole.find(parameter.name);
    TORCH_CHECK_VALUE(found != whole.end(), check.name, ": the whole layer has no parameter ",
                      parameter.name);
    const auto shard = parameter.sharding.shard_of(found->second);
    TORCH_CHECK_VALUE(shard.sizes() == parameter.tensor.sizes(), check.name, ": parameter ",
                      parameter.name, " has shape ", parameter.tensor.sizes(), ", but its cut of ",
                      found->second.sizes(), " is ", shard.sizes(),
                      parameter.sharding.replicated()
                          ? "; say how it is cut, as ParallelModule or by parameter_sharding"
                          : "");
    parameter.tensor.copy_(shard);
  }
}

Result run(const LayerCheck& check, const std::shared_ptr<Communicator>& comm,
           torch::ScalarType dtype, const std::map<std::string, Tensor>& whole, const Tensor& x,
           const Tensor& dy) {
  const auto layer = check.make(comm);
  layer->to(dtype);
  auto parameters = parameters_of(check, *layer, comm);
  fill(check, parameters, whole);
  auto input = cut_of(check.input_sharding, comm).shard_of(x).to(dtype).clone();
  input.set_requires_grad(true);
  Result result;
  comm->reset_counters();
  const auto output = check.forward(*layer, input);
  result.forward = comm->counters();
  comm->reset_counters();
  const auto gradient = cut_of(check.output_sharding, comm).shard_of(dy).to(dtype);
  TORCH_CHECK_VALUE(output.sizes() == gradient.sizes(), check.name, ": the output has shape ",
                    output.sizes(), ", but its cut of ", dy.sizes(), " is ", gradient.sizes(),
                    "; see output_sharding");
  output.backward(gradient);
  result.backward = comm->counters();
  result.output = output.detach();
  result.input_gradient = input.grad();
  for (const auto& parameter : parameters)
    result.gradients[parameter.name] = parameter.tensor.grad().defined()
                                           ? parameter.tensor.grad()
                                           : torch::zeros_like(parameter.tensor);
  return result;
}

/// Compares one tensor; the largest error of all ranks.
LayerReport::Line compare(const LayerCheck& check, const std::string& quantity, const Tensor& split,
                          const Tensor& whole, const Tensor& exact, const Sharding& sharding,
                          Communicator& comm) {
  const double ulp = ulp_of(exact, check.dtype);
  LayerReport::Line line;
  line.quantity = quantity;
  line.whole_ulps = error_in_ulps(whole, exact, ulp);
  auto error =
      torch::tensor({error_in_ulps(split, sharding.shard_of(exact.detach()), ulp)}, torch::kDouble);
  comm.all_reduce(error, ReduceOp::max);
  line.split_ulps = error.item<double>();
  line.limit_ulps =
      check.tolerance_ulps.value_or(default_tolerance(check.dtype)) + 2 * line.whole_ulps;
  line.passed = line.split_ulps <= line.limit_ulps;
  return line;
}

LayerReport::Count count(const std::string& quantity, int64_t measured,
                         std::optional<int64_t> expected, Communicator& comm) {
  auto words = torch::tensor({measured, int64_t{expected && *expected != measured}});
  comm.all_reduce(words, ReduceOp::max);
  return {quantity, words[0].item<int64_t>(), expected, words[1].item<int64_t>() == 0};
}

}  // namespace

bool LayerReport::passed() const {
  for (const auto& line : lines)
    if (!line.passed) return false;
  for (const auto& each : counts)
    if (!each.passed) return false;
  return true;
}

std::string LayerReport::table() const {
  size_t width = 16;
  for (const auto& line : lines) width = std::max(width, line.quantity.size());
  std::ostringstream out;
  const auto name = [&](const std::string& text) {
    out << std::left << std::setw(static_cast<int>(width) + 2) << text << std::right;
  };
  out << title << "\n\n";
  name("error in ULPs");
  out << "     split     whole     limit\n" << std::setprecision(3);
  std::string failed;
  const auto verdict = [&](bool passed, const std::string& quantity) {
    out << (passed ? "  ok" : "  FAILED") << "\n";
    if (!passed) failed += (failed.empty() ? "" : ", ") + quantity;
  };
  for (const auto& line : lines) {
    name(line.quantity);
    out << std::setw(10) << line.split_ulps << std::setw(10) << line.whole_ulps << std::setw(10)
        << line.limit_ulps;
    verdict(line.passed, line.quantity);
  }
  out << "\n";
  name("communication");
  out << "  measured  expected\n";
  for (const auto& each : counts) {
    name(each.quantity);
    out << std::setw(10) << each.measured << std::setw(10)
        << (each.expected ? std::to_string(*each.expected) : "-");
    verdict(each.passed, each.quantity);
  }
  out << "\n" << (failed.empty() ? "passed" : "FAILED: " + failed) << "\n";
  return out.str();
}

LayerReport check_layer(const LayerCheck& check, const std::shared_ptr<Communicator>& comm) {
  TORCH_CHECK_VALUE(check.make && check.forward, check.name,
                    ": a LayerCheck needs make and forward");
  const auto parameters = whole_parameters(check, *comm);
  const auto x = torch::randn(check.input_shape, torch::kDouble).to(check.dtype).to(torch::kDouble);
  Tensor dy;
  {
    const torch::NoGradGuard no_grad;
    const auto alone = self_communicator();
    const auto layer = check.make(alone);
    layer->to(torch::kDouble);
    dy = torch::randn(check.forward(*layer, x).sizes(), torch::kDouble)
             .to(check.dtype)
             .to(torch::kDouble);
  }
  const auto exact = run(check, self_communicator(), torch::kDouble, parameters, x, dy);
  const auto whole = run(check, self_communicator(), check.dtype, parameters, x, dy);
  const auto split = run(check, comm, check.dtype, parameters, x, dy);

  LayerReport report;
  std::ostringstream title;
  title << check.name << " over " << comm->size() << (comm->size() == 1 ? " rank" : " ranks")
        << ", " << c10::toString(check.dtype) << ", input "
        << c10::str(at::IntArrayRef(check.input_shape));
  report.title = title.str();
  report.lines.push_back(compare(check, "output", split.output, whole.output, exact.output,
                                 cut_of(check.output_sharding, comm), *comm));
  report.lines.push_back(compare(check, "input gradient", split.input_gradient,
                                 whole.input_gradient, exact.input_gradient,
                                 cut_of(check.input_sharding, comm), *comm));
  for (const auto& parameter : parameters_of(check, *check.make(comm), comm)) {
    const auto& name = parameter.name;
    report.lines.push_back(compare(check, name, split.gradients.at(name), whole.gradients.at(name),
                                   exact.gradients.at(name), parameter.sharding, *comm));
  }
  const auto add = [&](const char* pass, const Counters& counters,
                       std::optional<int64_t> collectives, std::optional<int64_t> bytes) {
    const std::string prefix(pass);
    report.counts.push_back(
        count(prefix + " collectives", counters.collectives(), collectives, *comm));
    report.counts.push_back(count(prefix + " bytes", counters.bytes, bytes, *comm));
  };
  add("forward", split.forward, check.forward_collectives, check.forward_bytes);
  add("backward", split.backward, check.backward_collectives, check.backward_bytes);
  return report;
}

}  // namespace syncnorm
