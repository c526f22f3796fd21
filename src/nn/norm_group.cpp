#include "syncnorm/norm_group.h"

#include <algorithm>

#include "nn/prepared_norm.h"

namespace syncnorm {
namespace {

/// What one collective can serve: one communicator, buffers on one device.
void check_together(const PreparedNorm& first, const PreparedNorm& other,
                    const std::string& group) {
  TORCH_CHECK_VALUE(first.comm == other.comm, group, ": ", first.part.label, " is over ",
                    first.comm->name(), ", ", other.part.label, " over ",
                    other.comm == nullptr ? "" : other.comm->name(),
                    ", another communicator; give all norms of a group the same one, the very "
                    "object, with .communicator(...)");
  const auto here = first.tensors.x.device(), there = other.tensors.x.device();
  TORCH_CHECK_VALUE(here == there, group, ": the input of ", first.part.label, " is on ", here,
                    ", that of ", other.part.label, " on ", there,
                    "; a group's inputs must be on one device");
}

}  // namespace

NormGroup::NormGroup(std::vector<Member> norms, std::string name)
    : NamedModule("NormGroup", std::move(name)), norms_(std::move(norms)) {
  TORCH_CHECK_VALUE(!norms_.empty(), display_name(), ": a group needs at least one norm");
  for (size_t i = 0; i < norms_.size(); ++i) {
    TORCH_CHECK_VALUE(norms_[i].module_ != nullptr, display_name(), ": norm ", i, " is null");
    const auto same = [&](const Member& other) { return other.module_ == norms_[i].module_; };
    const auto first = std::find_if(norms_.begin(), norms_.end(), same) - norms_.begin();
    TORCH_CHECK_VALUE(first == static_cast<int64_t>(i) || norms_[i].module_->buffers().empty(),
                      display_name(), ": norms ", first, " and ", i, " are the same module, ",
                      norms_[i].module_->name(),
                      ", whose running statistics one call can update only once; use two modules, "
                      "or call it twice outside the group");
  }
}

std::vector<torch::Tensor> NormGroup::forward(const std::vector<torch::Tensor>& inputs) {
  std::vector<torch::Tensor> outputs;
  for (auto& both : forward_residual(inputs, std::vector<torch::Tensor>(inputs.size())))
    outputs.push_back(std::move(both.first));
  return outputs;
}

std::vector<std::pair<torch::Tensor, torch::Tensor>> NormGroup::forward_residual(
    const std::vector<torch::Tensor>& inputs, const std::vector<torch::Tensor>& residuals) {
  TORCH_CHECK_VALUE(inputs.size() == size() && residuals.size() == size(), display_name(),
                    ": expected ", size(), " inputs and as many residuals, one for each norm, got ",
                    inputs.size(), " and ", residuals.size());
  std::vector<std::pair<torch::Tensor, torch::Tensor>> results(size());
  std::vector<PreparedNorm> together;
  std::vector<size_t> places;
  for (size_t i = 0; i < size(); ++i) {
    auto norm = norms_[i].norm_->prepare(inputs[i], residuals[i]);
    results[i].first = norm.output;
    if (norm.output.defined()) continue;
    norm.part.label = "norm " + std::to_string(i) + " (" + norm.name + ")";
    if (!together.empty()) check_together(together.front(), norm, display_name());
    together.push_back(std::move(norm));
    places.push_back(i);
  }
  if (together.empty()) return results;

  std::vector<bool> sums;
  for (const auto& norm : together) sums.push_back(norm.tensors.place == ResidualPlace::before);
  const auto outputs = run_norms(std::move(together), display_name());
  size_t next = 0;
  for (size_t k = 0; k < places.size(); ++k) {
    results[places[k]].first = outputs[next++];
    if (sums[k]) results[places[k]].second = outputs[next++];
  }
  return results;
}

}  // namespace syncnorm
