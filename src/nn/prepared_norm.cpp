#include "nn/prepared_norm.h"

namespace syncnorm {

std::vector<torch::Tensor> run_norms(std::vector<PreparedNorm> norms, const std::string& name) {
  const auto call = c10::make_intrusive<NormCall>();
  call->comm = norms.front().comm;
  call->module = name;
  std::vector<NormTensors> tensors;
  for (auto& norm : norms) {
    call->parts.push_back(std::move(norm.part));
    tensors.push_back(std::move(norm.tensors));
  }
  const ModuleScope scope(name);
  const auto moments = exchange_statistics(tensors, *call);
  for (size_t i = 0; i < norms.size(); ++i)
    if (norms[i].received) norms[i].received(moments[i]);
  return apply_norms(tensors, moments, call);
}

std::vector<torch::Tensor> run_norm(PreparedNorm norm) {
  std::vector<PreparedNorm> norms;
  const auto name = norm.name;
  norms.push_back(std::move(norm));
  return run_norms(std::move(norms), name);
}

}  // namespace syncnorm
