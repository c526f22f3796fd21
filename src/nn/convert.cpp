#include "syncnorm/convert.h"

#include <algorithm>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "nn/module_registry.h"
#include "syncnorm/named_module.h"
#include "syncnorm/sync_batch_norm.h"

namespace syncnorm {
namespace {

using torch::nn::Module;
using ModulePtr = std::shared_ptr<Module>;

/// One norm in the tree, and all the places that the tree holds it in.
struct Site {
  std::weak_ptr<Module> norm;
  std::string path;
  std::vector<ChildSlot> slots;
  long owners = 0;  ///< references that the slots account for
};

std::string child_path(const std::string& parent, const std::string& name) {
  return parent.empty() ? name : parent + '.' + name;
}

/// Finds the norms that `wanted` accepts (it may raise), in the order of the tree; each module is
/// entered once.
template <typename Wanted>
class TreeSearch {
 public:
  explicit TreeSearch(Wanted wanted) : wanted_(std::move(wanted)) {}

  std::vector<Site> operator()(const ModulePtr& root) {
    visit(*root, "");
    return std::move(sites_);
  }

 private:
  void visit(Module& module, const std::string& path) {
    if (!entered_.insert(&module).second) return;
    for (auto& slot : child_slots(module)) {
      // No copy of the pointer: it would count as an owner.
      Module& child = *slot.child();
      const auto name = child_path(path, slot.name());
      if (wanted_(child, name)) {
        note(child, name, std::move(slot));
      } else {
        visit(child, name);
      }
    }
  }

  void note(Module& norm, const std::string& path, ChildSlot slot) {
    const auto [known, added] = index_.emplace(&norm, sites_.size());
    if (added) sites_.push_back(Site{slot.child(), path, {}, 0});
    auto& site = sites_[known->second];
    site.owners += slot.owners();
    site.slots.push_back(std::move(slot));
  }

  Wanted wanted_;
  std::unordered_set<const Module*> entered_;
  std::unordered_map<const Module*, size_t> index_;
  std::vector<Site> sites_;
};

template <typename Wanted>
std::vector<Site> find_norms(const ModulePtr& root, Wanted wanted) {
  return TreeSearch<Wanted>(std::move(wanted))(root);
}

/// Raises where somebody outside the tree would go on calling what is about to be replaced.
void check_owners(const std::vector<Site>& sites, const char* from, const char* to,
                  const char* cure) {
  for (const auto& site : sites) {
    TORCH_CHECK(
        site.norm.use_count() <= site.owners, "'", site.path, "' is a ", from,
        " that somebody besides the module tree still owns (", site.norm.use_count() - site.owners,
        " more), most likely a typed member of its parent: forward would go on calling it after "
        "the ",
        to, " took its place in the tree. Nothing was changed. ", cure);
  }
}

/// Puts the tensors of `from` into `to`, members and registry, and copies what is not an option.
template <typename From, typename To>
void adopt_state(const From& from, To& to) {
  to.weight = from.weight;
  to.bias = from.bias;
  to.running_mean = from.running_mean;
  to.running_var = from.running_var;
  to.num_batches_tracked = from.num_batches_tracked;
  if (to.weight.defined()) {
    replace_parameter(to, "weight", to.weight);
    replace_parameter(to, "bias", to.bias);
  }
  if (to.running_mean.defined()) {
    replace_buffer(to, "running_mean", to.running_mean);
    replace_buffer(to, "running_var", to.running_var);
    replace_buffer(to, "num_batches_tracked", to.num_batches_tracked);
  }
  to.train(from.is_training());
}

template <typename Impl>
std::shared_ptr<Impl> new_batch_norm(const SyncBatchNormImpl& from) {
  auto norm = std::make_shared<Impl>(torch::nn::BatchNormOptions(from.options.num_features())
                                         .eps(from.options.eps())
                                         .momentum(from.options.momentum())
                                         .affine(from.weight.defined())
                                         .track_running_stats(from.running_mean.defined()));
  adopt_state(from, *norm);
  return norm;
}

template <typename Impl>
Replacement to_batch_norm(const SyncBatchNormImpl& from) {
  return Replacement(new_batch_norm<Impl>(from));
}

Replacement revert_one(const Module& module) {
  const auto& norm = *module.as<SyncBatchNormImpl>();
  switch (norm.batch_norm_dims) {
    case 1:
      return to_batch_norm<torch::nn::BatchNorm1dImpl>(norm);
    case 3:
      return to_batch_norm<torch::nn::BatchNorm3dImpl>(norm);
    default:
      return to_batch_norm<torch::nn::BatchNorm2dImpl>(norm);
  }
}

template <typename Impl>
bool convert_as(const Module& module, int dims, const std::shared_ptr<Communicator>& comm,
                std::optional<Replacement>& result) {
  const auto* norm = module.as<Impl>();
  if (norm == nullptr) return false;
  auto sync =
      std::make_shared<SyncBatchNormImpl>(SyncBatchNormOptions(norm->options.num_features())
                                              .eps(norm->options.eps())
                                              .momentum(norm->options.momentum())
                                              .affine(norm->weight.defined())
                                              .track_running_stats(norm->running_mean.defined())
                                              .communicator(comm));
  sync->batch_norm_dims = dims;
  adopt_state(*norm, *sync);
  result.emplace(std::move(sync));
  return true;
}

Replacement convert_one(const Module& module, const std::shared_ptr<Communicator>& comm) {
  std::optional<Replacement> result;
  const bool known = convert_as<torch::nn::BatchNorm1dImpl>(module, 1, comm, result) ||
                     convert_as<torch::nn::BatchNorm2dImpl>(module, 2, comm, result) ||
                     convert_as<torch::nn::BatchNorm3dImpl>(module, 3, comm, result);
  TORCH_INTERNAL_ASSERT(known);
  return std::move(*result);
}

template <typename Impl>
bool is_batch_norm(const Module& module, const std::string& path) {
  if (module.as<Impl>() == nullptr) return false;
  TORCH_CHECK(typeid(module) == typeid(Impl), "convert_sync_batchnorm: '", path, "' is a ",
              module.name(),
              ", a class derived from BatchNorm, whose own forward would be lost. "
              "Nothing was changed. Replace it by hand, or derive it from SyncBatchNormImpl.");
  return true;
}

bool is_any_batch_norm(const Module& module, const std::string& path) {
  return is_batch_norm<torch::nn::BatchNorm1dImpl>(module, path) ||
         is_batch_norm<torch::nn::BatchNorm2dImpl>(module, path) ||
         is_batch_norm<torch::nn::BatchNorm3dImpl>(module, path);
}

/// Builds every replacement first, so that a failure leaves the tree as it was; then puts them in.
template <typename Make>
void replace_all(std::vector<Site>& sites, Make make) {
  std::vector<Replacement> replacements;
  for (const auto& site : sites) replacements.push_back(make(*site.norm.lock()));
  for (size_t i = 0; i < sites.size(); ++i) {
    for (auto& slot : sites[i].slots) slot.replace(replacements[i]);
  }
}

}  // namespace

std::shared_ptr<Module> convert_sync_batchnorm(const ModulePtr& module,
                                               const std::shared_ptr<Communicator>& comm) {
  TORCH_CHECK(module != nullptr, "convert_sync_batchnorm: the module is null.");
  if (is_any_batch_norm(*module, "the root")) return convert_one(*module, comm).module();
  auto sites = find_norms(module, is_any_batch_norm);
  check_owners(
      sites, "BatchNorm", "SyncBatchNorm",
      "Declare the member as syncnorm::SyncBatchNorm (over self_communicator() it is plain batch "
      "norm), or hold the BatchNorm in the tree only.");
  replace_all(sites, [&](const Module& norm) { return convert_one(norm, comm); });
  name_modules(*module);
  return module;
}

std::shared_ptr<Module> revert_sync_batchnorm(const ModulePtr& module) {
  TORCH_CHECK(module != nullptr, "revert_sync_batchnorm: the module is null.");
  const auto wanted = [](const Module& m, const std::string& path) {
    if (m.as<SyncBatchNormImpl>() == nullptr) return false;
    TORCH_CHECK(typeid(m) == typeid(SyncBatchNormImpl), "revert_sync_batchnorm: '", path, "' is a ",
                m.name(),
                ", a class derived from SyncBatchNorm, whose own forward would be lost. "
                "Nothing was changed.");
    TORCH_CHECK(
        !m.as<SyncBatchNormImpl>()->options.relu(), "revert_sync_batchnorm: '", path,
        "' applies a ReLU (options.relu()), which no BatchNorm has and which would be lost. "
        "Nothing was changed. Set options.relu(false) and put a torch::nn::ReLU after it.");
    return true;
  };
  if (wanted(*module, "")) return revert_one(*module).module();
  auto sites = find_norms(module, wanted);
  check_owners(
      sites, "SyncBatchNorm", "BatchNorm",
      "Give that member a communicator of one (options.communicator(self_communicator())) instead, "
      "or hold the SyncBatchNorm in the tree only.");
  replace_all(sites, revert_one);
  return module;
}

void name_modules(Module& module) {
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    auto* norm = item.value()->as<SyncBatchNormImpl>();
    if (norm != nullptr && norm->options.name().empty()) norm->options.name(item.key());
    auto* named = dynamic_cast<NamedModule*>(item.value().get());
    if (named != nullptr && !named->has_given_name()) named->set_display_name(item.key());
  }
}

}  // namespace syncnorm
