#include "syncnorm/data_parallel.h"

#include <algorithm>
#include <sstream>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <unordered_set>

#include "parallel/coalesce.h"
#include "parallel/verify_replicas.h"
#include "syncnorm/convert.h"
#include "syncnorm/environment.h"
#include "syncnorm/process_group.h"
#include "syncnorm/sync_batch_norm.h"

namespace syncnorm {
namespace {

using torch::nn::Module;

/// Named tensors without repetitions: a tensor that two modules share is one parameter.
NamedTensors distinct(const torch::OrderedDict<std::string, torch::Tensor>& all) {
  NamedTensors result;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : all) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      result.emplace_back(item.key(), item.value());
    }
  }
  return result;
}

std::vector<torch::Tensor> tensors_of(const NamedTensors& named) {
  std::vector<torch::Tensor> tensors;
  for (const auto& [name, tensor] : named) tensors.push_back(tensor);
  return tensors;
}

void check_no_sparse_gradients(const Module& module) {
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    const auto* embedding = item.value()->as<torch::nn::EmbeddingImpl>();
    const auto* bag = item.value()->as<torch::nn::EmbeddingBagImpl>();
    TORCH_CHECK(
        !(embedding != nullptr && embedding->options.sparse()) &&
            !(bag != nullptr && bag->options.sparse()),
        "DistributedDataParallel: '", item.key(),
        "' makes sparse gradients, which are not reduced here; build it with sparse(false).");
  }
}

/// Buffers that rank 0 decides. SyncBatchNorm's are the same on all ranks by themselves.
std::vector<torch::Tensor> buffers_to_broadcast(Module& module) {
  std::unordered_set<const c10::TensorImpl*> synchronised;
  const auto note = [&](const Module& m) {
    if (m.as<SyncBatchNormImpl>() == nullptr) return;
    for (const auto& buffer : m.buffers(/*recurse=*/false)) {
      synchronised.insert(buffer.unsafeGetTensorImpl());
    }
  };
  note(module);
  for (const auto& item : module.named_modules("", /*include_self=*/false)) note(*item.value());
  std::vector<torch::Tensor> result;
  for (const auto& [name, buffer] : distinct(module.named_buffers())) {
    if (synchronised.count(buffer.unsafeGetTensorImpl()) == 0) result.push_back(buffer);
  }
  return result;
}

}  // namespace

struct DataParallelReducer::State {
  std::shared_ptr<Module> module;
  DistributedDataParallelOptions options;
  std::shared_ptr<Communicator> comm;
  std::vector<torch::Tensor> buffers;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  // Null where no parameter wants a gradient.
  std::shared_ptr<c10d::Reducer> reducer;
  // The Reducer searches for unused parameters only with a living logger.
  std::shared_ptr<c10d::Logger> logger;
  bool sync = true;

  // The Reducer's parameters by its index: themselves, their names, and the nodes its hooks hang
  // on.
  std::vector<torch::Tensor> reduced;
  std::vector<std::string> names;
  std::vector<const torch::autograd::Node*> accumulators;

  bool reduces() const { return sync && reducer != nullptr && torch::GradMode::is_enabled(); }
  void make_reducer(const NamedTensors& parameters);
  std::string names_in(const std::string& message) const;
  void check_hooks() const;

  /// Calls `body`; adds names to a complaint of the Reducer, which knows parameters by number.
  template <typename Body>
  void with_names(Body body) const {
    try {
      body();
    } catch (const c10::Error& error) {
      const std::string message = error.what_without_backtrace();
      TORCH_CHECK(false, message, names_in(message));
    }
  }
};

/// " By name: a, b" for the numbers after the words in which the Reducer lists them; "" where it
/// does not.
std::string DataParallelReducer::State::names_in(const std::string& message) const {
  const auto words = message.find("did not receive grad for rank");
  if (words == std::string::npos) return "";
  const auto colon = message.find(':', words);
  if (colon == std::string::npos) return "";
  std::istringstream numbers(message.substr(colon + 1));
  std::string text;
  for (size_t index = 0; numbers >> index && index < names.size();) {
    text += (text.empty() ? " By name: " : ", ") + names[index];
  }
  return text;
}

/// Some ways of giving a parameter new data (set_data on another dtype or device, a load from an
/// archive) cut it off from the Reducer's hooks: its gradient would no longer be averaged, and
/// nothing else would tell.
void DataParallelReducer::State::check_hooks() const {
  for (size_t i = 0; i < reduced.size(); ++i) {
    TORCH_CHECK(
        torch::autograd::impl::grad_accumulator(reduced[i]).get() == accumulators[i],
        "DistributedDataParallel: the data of '", names[i],
        "' was replaced after the module was wrapped, so its gradient would not be averaged. Load "
        "state before wrapping, or copy into the parameters in place (load_state_dict does).");
  }
}

void DataParallelReducer::State::make_reducer(const NamedTensors& parameters) {
  std::vector<torch::Tensor> params;
  std::unordered_map<size_t, std::string> names_by_index;
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.requires_grad()) continue;
    names_by_index[params.size()] = name;
    names.push_back(name);
    params.push_back(parameter);
  }
  if (params.empty()) return;
  const int64_t cap = options.bucket_cap_bytes();
  const int64_t first_cap = std::min<int64_t>(c10d::kDefaultFirstBucketBytes, cap);
  const std::vector<bool> dense(params.size(), false);
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(
      params, {static_cast<size_t>(first_cap), static_cast<size_t>(cap)}, dense));
  // Gradients come in about the reverse of the order of registration; the Reducer adopts the true
  // one after a step.
  std::reverse(buckets.begin(), buckets.end());
  group = as_process_group(comm);
  reducer = std::make_shared<c10d::Reducer>(
      params, std::move(buckets), group, dense, cap, options.find_unused_parameters(),
      options.gradient_as_bucket_view(), std::move(names_by_index), first_cap,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
      /*bucket_bytes_cap_list=*/std::vector<int64_t>{});
  for (const auto& parameter : params)
    accumulators.push_back(torch::autograd::impl::grad_accumulator(parameter).get());
  reduced = params;
  logger = std::make_shared<c10d::Logger>(reducer);
  reducer->set_logger(logger);
}

DataParallelReducer::DataParallelReducer(std::shared_ptr<Module> module,
                                         const DistributedDataParallelOptions& options)
    : state_(std::make_unique<State>()) {
  TORCH_CHECK(module != nullptr, "DistributedDataParallel: the module is null.");
  TORCH_CHECK(options.bucket_cap_bytes() > 0, "DistributedDataParallel: bucket_cap_bytes is ",
              options.bucket_cap_bytes(), ", must be positive.");
  check_no_sparse_gradients(*module);
  state_->comm = communicator_or_world(options.communicator(), "DistributedDataParallel");
  state_->options = options;
  name_modules(*module);

  const auto parameters = distinct(module->named_parameters());
  const auto buffers = distinct(module->named_buffers());
  verify_replicas(*state_->comm, parameters, buffers, options);
  auto tensors = tensors_of(parameters);
  const auto more = tensors_of(buffers);
  tensors.insert(tensors.end(), more.begin(), more.end());
  broadcast_coalesced(*state_->comm, tensors, /*root=*/0);

  if (options.broadcast_buffers()) state_->buffers = buffers_to_broadcast(*module);
  state_->module = std::move(module);
  state_->make_reducer(parameters);
}

DataParallelReducer::~DataParallelReducer() = default;

void DataParallelReducer::before_forward() {
  if (state_->reduces()) {
    state_->check_hooks();
    state_->with_names([&] {
      state_->reducer->prepare_for_forward();
      state_->reducer->rebuild_buckets();
    });
  }
  const bool training =
      state_->sync && torch::GradMode::is_enabled() && state_->module->is_training();
  if (training && !state_->buffers.empty()) {
    broadcast_coalesced(*state_->comm, state_->buffers, /*root=*/0);
  }
}

void DataParallelReducer::after_forward(const std::vector<torch::Tensor>& outputs) {
  if (!state_->reduces()) return;
  // The outputs tell which parameters the backward pass will reach; without them all are expected.
  const bool search = state_->options.find_unused_parameters();
  state_->with_names([&] {
    state_->reducer->prepare_for_backward(search ? outputs : std::vector<torch::Tensor>());
  });
}

bool DataParallelReducer::set_sync(bool enabled) { return std::exchange(state_->sync, enabled); }

const std::shared_ptr<Communicator>& DataParallelReducer::communicator() const {
  return state_->comm;
}

}  // namespace syncnorm
