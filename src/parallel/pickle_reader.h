#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace syncnorm {

/// What a pickle of PyTorch holds, as far as a dict of tensors needs it.
struct PickleValue {
  enum class Kind {
    none,
    boolean,
    integer,
    real,
    string,
    tuple,
    dict,
    global,
    storage,
    tensor,
    mark
  };
  using Ptr = std::shared_ptr<PickleValue>;

  explicit PickleValue(Kind k) : kind(k) {}

  Kind kind;
  int64_t integer = 0;                               ///< of boolean and integer
  std::string text;                                  ///< of string; "module.name" of global
  std::vector<Ptr> items;                            ///< of tuple (and list)
  std::vector<std::pair<Ptr, Ptr>> entries;          ///< of dict, in the order of the file
  c10::Storage storage;                              ///< of storage
  at::ScalarType dtype = at::ScalarType::Undefined;  ///< of storage
  at::Tensor tensor;                                 ///< of tensor
};

/// A word for messages: "a dict", "an integer", ...
const char* describe(PickleValue::Kind kind);

/// Reads one pickle (protocol 2, of torch.save or of torch::pickle_save) without executing
/// anything: it knows dicts, OrderedDicts (attributes dropped), tuples, lists, numbers, strings,
/// tensors and parameters. Raises c10::Error naming what else it meets.
///
/// `load_storage(key, bytes)` returns the bytes of a tensor's storage.
PickleValue::Ptr read_pickle(
    const std::string& pickle,
    const std::function<c10::Storage(const std::string&, size_t)>& load_storage);

}  // namespace syncnorm
