#include "syncnorm/state_dict.h"

#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "parallel/atomic_file.h"
#include "parallel/pickle_reader.h"

namespace syncnorm {
namespace {

using Tensors = torch::OrderedDict<std::string, torch::Tensor>;

Tensors state_of(const torch::nn::Module& module) {
  Tensors state = module.named_parameters();
  for (const auto& buffer : module.named_buffers()) state.insert(buffer.key(), buffer.value());
  return state;
}

/// A copy that stands alone: on the host, and not a small part of somebody's large storage.
torch::Tensor standalone(const torch::Tensor& tensor) {
  auto result = tensor.detach().cpu();
  const bool whole = result.storage_offset() == 0 && result.storage().nbytes() == result.nbytes();
  return whole ? result : result.clone();
}

/// The pickle of a plain dict, and the tensors whose storages it refers to by number.
/// (torch::pickle_save would add type tags, which torch.load refuses unless told to execute code
/// from the file.)
std::pair<std::string, std::vector<torch::Tensor>> pickle_dict(const Tensors& state) {
  c10::Dict<std::string, torch::Tensor> dict;
  for (const auto& item : state) dict.insert(item.key(), standalone(item.value()));
  std::string text;
  torch::jit::Pickler pickler([&](const char* bytes, size_t size) { text.append(bytes, size); },
                              nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();
  return {std::move(text), pickler.tensorData()};
}

std::string join(const std::vector<std::string>& names) {
  constexpr size_t kShown = 8;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) text += (i ? ", " : "") + names[i];
  if (names.size() > kShown) text += ", ... (" + std::to_string(names.size()) + " in all)";
  return text;
}

/// The tensors of a file, by key. Raises c10::Error that names the file.
Tensors read_file(const std::string& path) {
  const auto name = "load_state_dict: '" + path + "'";
  TORCH_CHECK(std::ifstream(path).good(), name, " cannot be opened: ", std::strerror(errno), ".");
  Tensors state;
  try {
    caffe2::serialize::PyTorchStreamReader archive(path);
    const auto record = [&](const std::string& key) {
      auto [bytes, size] = archive.getRecord(key);
      return std::make_pair(std::move(bytes), size);
    };
    if (archive.hasRecord("byteorder")) {
      const auto [order, size] = record("byteorder");
      TORCH_CHECK(std::string(static_cast<const char*>(order.get()), size) == "little",
                  "it was written on a big-endian machine");
    }
    const auto load_storage = [&](const std::string& key, size_t expected) {
      auto [bytes, size] = record("data/" + key);
      TORCH_CHECK(size == expected, "it is damaged: storage ", key, " has ", size, " bytes, not ",
                  expected);
      return c10::Storage(c10::Storage::use_byte_size_t(), static_cast<int64_t>(size),
                          std::move(bytes), /*allocator=*/nullptr, /*resizable=*/false);
    };
    const auto [pickle, length] = record("data.pkl");
    const auto root =
        read_pickle(std::string(static_cast<const char*>(pickle.get()), length), load_storage);
    TORCH_CHECK(root->kind == PickleValue::Kind::dict, "it holds ", describe(root->kind),
                ", not a dict of tensors");
    for (const auto& [key, value] : root->entries) {
      TORCH_CHECK(key->kind == PickleValue::Kind::string, "a key is ", describe(key->kind));
      TORCH_CHECK(value->kind == PickleValue::Kind::tensor, "'", key->text, "' is ",
                  describe(value->kind), ", not a tensor (save module.state_dict() itself)");
      state.insert(key->text, value->tensor);
    }
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, name,
                " cannot be read as a dict of tensors of torch.save or save_state_dict: ",
                error.what_without_backtrace());
  }
  return state;
}

std::string differences(const Tensors& wanted, const Tensors& given) {
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  std::vector<std::string> reshaped;
  for (const auto& item : wanted) {
    const auto* found = given.find(item.key());
    if (found == nullptr) {
      missing.push_back(item.key());
    } else if (found->sizes() != item.value().sizes()) {
      reshaped.push_back(c10::str(item.key(), " (", found->sizes(), " in the file, ",
                                  item.value().sizes(), " in the module)"));
    }
  }
  for (const auto& item : given) {
    if (!wanted.contains(item.key())) unexpected.push_back(item.key());
  }
  std::string text;
  if (!missing.empty()) text += " Missing from the file: " + join(missing) + '.';
  if (!unexpected.empty()) text += " Not in the module: " + join(unexpected) + '.';
  if (!reshaped.empty()) text += " Of another shape: " + join(reshaped) + '.';
  const bool wrapped = !unexpected.empty() && unexpected.front().rfind("module.", 0) == 0;
  if (wrapped)
    text +=
        " (The file comes from a wrapper such as Python's DistributedDataParallel: save its "
        ".module's state_dict().)";
  return text;
}

}  // namespace

void save_state_dict(const torch::nn::Module& module, const std::string& path) {
  save_state_dict(state_of(module), path);
}

void save_state_dict(const Tensors& state, const std::string& path) {
  const auto [pickle, tensors] = pickle_dict(state);
  AtomicFile file(path, "save_state_dict");
  caffe2::serialize::PyTorchStreamWriter archive([&](const void* data, size_t size) {
    file.write(data, size);
    return size;
  });
  archive.writeRecord("data.pkl", pickle.data(), pickle.size());
  archive.writeRecord("byteorder", "little", 6);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& storage = tensors[i].storage();
    archive.writeRecord("data/" + std::to_string(i), storage.data(), storage.nbytes());
  }
  archive.writeEndOfFile();
  file.commit();
}

Tensors read_state_dict(const std::string& path) { return read_file(path); }

void load_state_dict(torch::nn::Module& module, const std::string& path) {
  const auto given = read_file(path);
  auto wanted = state_of(module);
  const auto problems = differences(wanted, given);
  TORCH_CHECK(problems.empty(), "load_state_dict: '", path, "' does not fit the module.", problems,
              " Nothing was changed.");
  const torch::NoGradGuard no_grad;
  for (auto& item : wanted) item.value().copy_(given[item.key()]);
}

}  // namespace syncnorm
