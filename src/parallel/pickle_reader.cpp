#include "parallel/pickle_reader.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace syncnorm {
namespace {

using Kind = PickleValue::Kind;
using Ptr = PickleValue::Ptr;

Ptr make(Kind kind) { return std::make_shared<PickleValue>(kind); }

Ptr make_integer(int64_t value, Kind kind = Kind::integer) {
  auto result = make(kind);
  result->integer = value;
  return result;
}

Ptr make_text(Kind kind, std::string text) {
  auto result = make(kind);
  result->text = std::move(text);
  return result;
}

Ptr make_tuple(std::vector<Ptr> items) {
  auto result = make(Kind::tuple);
  result->items = std::move(items);
  return result;
}

at::ScalarType storage_dtype(const std::string& name) {
  static const std::unordered_map<std::string, at::ScalarType> known = {
      {"torch.DoubleStorage", at::kDouble},
      {"torch.FloatStorage", at::kFloat},
      {"torch.HalfStorage", at::kHalf},
      {"torch.BFloat16Storage", at::kBFloat16},
      {"torch.LongStorage", at::kLong},
      {"torch.IntStorage", at::kInt},
      {"torch.ShortStorage", at::kShort},
      {"torch.CharStorage", at::kChar},
      {"torch.ByteStorage", at::kByte},
      {"torch.BoolStorage", at::kBool},
      {"torch.ComplexFloatStorage", at::kComplexFloat},
      {"torch.ComplexDoubleStorage", at::kComplexDouble}};
  const auto found = known.find(name);
  TORCH_CHECK(found != known.end(), "it holds a ", name, ", whose dtype is not known here");
  return found->second;
}

const PickleValue& argument(const Ptr& arguments, size_t index, Kind kind) {
  TORCH_CHECK(arguments->kind == Kind::tuple && index < arguments->items.size() &&
                  arguments->items[index]->kind == kind,
              "it is damaged: argument ", index, " of a tensor is not ", describe(kind));
  return *arguments->items[index];
}

std::vector<int64_t> integers(const PickleValue& tuple) {
  std::vector<int64_t> result;
  for (const auto& item : tuple.items) {
    TORCH_CHECK(item->kind == Kind::integer && item->integer >= 0,
                "it is damaged: a tensor's size or stride is not a count");
    result.push_back(item->integer);
  }
  return result;
}

/// torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)
Ptr rebuild_tensor(const Ptr& arguments) {
  const auto& storage = argument(arguments, 0, Kind::storage);
  const int64_t offset = argument(arguments, 1, Kind::integer).integer;
  const auto sizes = integers(argument(arguments, 2, Kind::tuple));
  const auto strides = integers(argument(arguments, 3, Kind::tuple));
  TORCH_CHECK(sizes.size() == strides.size() && offset >= 0,
              "it is damaged: a tensor's size, stride and offset do not fit each other");
  int64_t last = offset;
  bool empty = false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    empty = empty || sizes[d] == 0;
    last += (sizes[d] - 1) * strides[d];
  }
  const auto available =
      static_cast<int64_t>(storage.storage.nbytes() / c10::elementSize(storage.dtype));
  TORCH_CHECK(empty || last < available, "it is damaged: a tensor reaches element ", last, " of ",
              available);
  auto result = make(Kind::tensor);
  result->tensor = at::empty({0}, storage.dtype);
  if (empty) {
    result->tensor = at::empty_strided(sizes, strides, storage.dtype);
  } else {
    result->tensor.set_(storage.storage, offset, sizes, strides);
  }
  return result;
}

/// What calling the global `name` gives; state dicts call nothing else.
Ptr call(const std::string& name, const Ptr& arguments) {
  if (name == "collections.OrderedDict") {
    TORCH_CHECK(arguments->kind == Kind::tuple && arguments->items.empty(),
                "it holds an OrderedDict written in an unknown way");
    return make(Kind::dict);
  }
  if (name == "torch._utils._rebuild_tensor_v2") return rebuild_tensor(arguments);
  const bool wraps =
      name == "torch._utils._rebuild_parameter" || name == "torch.jit._pickle.restore_type_tag";
  if (wraps && arguments->kind == Kind::tuple && !arguments->items.empty()) {
    return arguments->items.front();
  }
  TORCH_CHECK(false, "it holds a ", name, ", which is no part of a dict of tensors");
}

/// The stack machine of the pickle format (Python's Lib/pickletools.py documents the opcodes).
class Machine {
 public:
  using LoadStorage = std::function<c10::Storage(const std::string&, size_t)>;

  Machine(const std::string& pickle, const LoadStorage& load_storage)
      : pickle_(pickle), load_storage_(load_storage) {}

  Ptr run() {
    while (!step(static_cast<unsigned char>(take(1)[0]))) {
    }
    return pop();
  }

 private:
  const char* take(size_t count) {
    TORCH_CHECK(count <= pickle_.size() - position_, "it is cut short");
    const char* bytes = pickle_.data() + position_;
    position_ += count;
    return bytes;
  }

  /// A little-endian number of `count` bytes.
  uint64_t number(size_t count) {
    const char* bytes = take(count);
    uint64_t value = 0;
    for (size_t i = 0; i < count; ++i) {
      value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
    }
    return value;
  }

  int64_t long_number() {
    const auto count = number(1);
    TORCH_CHECK(count <= 8, "it holds an integer of ", count, " bytes");
    if (count == 0) return 0;
    const auto unused = 64 - 8 * count;
    return static_cast<int64_t>(number(count) << unused) >> unused;
  }

  std::string line() {
    const auto end = pickle_.find('\n', position_);
    TORCH_CHECK(end != std::string::npos, "it is cut short");
    auto text = pickle_.substr(position_, end - position_);
    position_ = end + 1;
    return text;
  }

  Ptr pop() {
    TORCH_CHECK(!stack_.empty(), "it is damaged: its stack runs empty");
    auto value = std::move(stack_.back());
    stack_.pop_back();
    return value;
  }

  Ptr top() const {
    TORCH_CHECK(!stack_.empty(), "it is damaged: its stack runs empty");
    return stack_.back();
  }

  std::vector<Ptr> pop_last(size_t count) {
    TORCH_CHECK(count <= stack_.size(), "it is damaged: its stack runs empty");
    std::vector<Ptr> values(stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return values;
  }

  std::vector<Ptr> pop_to_mark() {
    const auto mark = std::find_if(stack_.rbegin(), stack_.rend(),
                                   [](const Ptr& value) { return value->kind == Kind::mark; });
    TORCH_CHECK(mark != stack_.rend(), "it is damaged: a mark is missing");
    auto values = pop_last(static_cast<size_t>(mark - stack_.rbegin()));
    stack_.pop_back();
    return values;
  }

  void push(Ptr value) { stack_.push_back(std::move(value)); }

  void set_items(const std::vector<Ptr>& values) {
    const auto dict = top();
    TORCH_CHECK(dict->kind == Kind::dict && values.size() % 2 == 0,
                "it is damaged: entries for something that is not a dict");
    for (size_t i = 0; i < values.size(); i += 2) {
      dict->entries.emplace_back(values[i], values[i + 1]);
    }
  }

  void append_items(const std::vector<Ptr>& values) {
    const auto list = top();
    TORCH_CHECK(list->kind == Kind::tuple, "it is damaged: items for something that is not a list");
    list->items.insert(list->items.end(), values.begin(), values.end());
  }

  /// ('storage', torch.FloatStorage, key, location, elements)
  Ptr load_storage(const Ptr& id) {
    TORCH_CHECK(argument(id, 0, Kind::string).text == "storage",
                "it refers to something not in it");
    const auto& key = argument(id, 2, Kind::string).text;
    auto& known = storages_[key];
    if (known == nullptr) {
      known = make(Kind::storage);
      known->dtype = storage_dtype(argument(id, 1, Kind::global).text);
      const auto elements = argument(id, 4, Kind::integer).integer;
      TORCH_CHECK(elements >= 0, "it is damaged: a storage of ", elements, " elements");
      known->storage =
          load_storage_(key, static_cast<size_t>(elements) * c10::elementSize(known->dtype));
    }
    return known;
  }

  void reduce() {
    const auto arguments = pop();
    const auto function = pop();
    TORCH_CHECK(function->kind == Kind::global, "it is damaged: it calls ",
                describe(function->kind));
    push(call(function->text, arguments));
  }

  Ptr recall(uint64_t slot) const {
    const auto found = memo_.find(slot);
    TORCH_CHECK(found != memo_.end(), "it is damaged: it refers to what was not stored");
    return found->second;
  }

  bool step(unsigned char opcode);
  bool step_scalar(unsigned char opcode);

  const std::string& pickle_;
  const LoadStorage& load_storage_;
  size_t position_ = 0;
  std::vector<Ptr> stack_;
  std::unordered_map<uint64_t, Ptr> memo_;
  std::unordered_map<std::string, Ptr> storages_;
};

/// Numbers and strings; false where `opcode` is another.
bool Machine::step_scalar(unsigned char opcode) {
  switch (opcode) {
    case 'N':
      push(make(Kind::none));
      return true;
    case 0x88:
      push(make_integer(1, Kind::boolean));
      return true;
    case 0x89:
      push(make_integer(0, Kind::boolean));
      return true;
    case 'K':
      push(make_integer(static_cast<int64_t>(number(1))));
      return true;
    case 'M':
      push(make_integer(static_cast<int64_t>(number(2))));
      return true;
    case 'J':
      push(make_integer(static_cast<int32_t>(number(4))));
      return true;
    case 0x8a:
      push(make_integer(long_number()));
      return true;
    case 'G':
      take(8);
      push(make(Kind::real));
      return true;
    case 'X': {
      const auto length = static_cast<size_t>(number(4));
      push(make_text(Kind::string, std::string(take(length), length)));
      return true;
    }
    default:
      return false;
  }
}

/// Executes one instruction; true at the last.
bool Machine::step(unsigned char opcode) {
  if (step_scalar(opcode)) return false;
  switch (opcode) {
    case 0x80:
      take(1);
      break;
    case '(':
      push(make(Kind::mark));
      break;
    case ')':
    case ']':
      push(make(Kind::tuple));
      break;
    case '}':
      push(make(Kind::dict));
      break;
    case 't':
      push(make_tuple(pop_to_mark()));
      break;
    case 0x85:
      push(make_tuple(pop_last(1)));
      break;
    case 0x86:
      push(make_tuple(pop_last(2)));
      break;
    case 0x87:
      push(make_tuple(pop_last(3)));
      break;
    case 'a':
      append_items(pop_last(1));
      break;
    case 'e':
      append_items(pop_to_mark());
      break;
    case 's':
      set_items(pop_last(2));
      break;
    case 'u':
      set_items(pop_to_mark());
      break;
    case 'q':
      memo_[number(1)] = top();
      break;
    case 'r':
      memo_[number(4)] = top();
      break;
    case 'h':
      push(recall(number(1)));
      break;
    case 'j':
      push(recall(number(4)));
      break;
    case 'c': {
      auto module = line();
      push(make_text(Kind::global, std::move(module) + '.' + line()));
      break;
    }
    case 'Q':
      push(load_storage(pop()));
      break;
    case 'R':
      reduce();
      break;
    // Attributes of an OrderedDict (torch.nn.Module's version numbers).
    case 'b':
      pop();
      break;
    case '.':
      return true;
    default:
      TORCH_CHECK(false, "it holds a pickle instruction ", static_cast<int>(opcode),
                  " that is no part of a dict of tensors");
  }
  return false;
}

}  // namespace

const char* describe(Kind kind) {
  switch (kind) {
    case Kind::none:
      return "None";
    case Kind::boolean:
      return "a bool";
    case Kind::integer:
      return "an integer";
    case Kind::real:
      return "a number";
    case Kind::string:
      return "a string";
    case Kind::tuple:
      return "a list or tuple";
    case Kind::dict:
      return "a dict";
    case Kind::global:
      return "a class or function";
    case Kind::storage:
      return "a storage";
    case Kind::tensor:
      return "a tensor";
    case Kind::mark:
      return "a mark";
  }
  return "";
}

Ptr read_pickle(const std::string& pickle,
                const std::function<c10::Storage(const std::string&, size_t)>& load_storage) {
  return Machine(pickle, load_storage).run();
}

}  // namespace syncnorm
