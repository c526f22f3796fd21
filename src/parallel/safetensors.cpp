#include "syncnorm/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "parallel/atomic_file.h"
#include "parallel/safetensors_file.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian");

namespace syncnorm {
namespace {

using torch::Tensor;
using Json = nlohmann::ordered_json;
using Entry = SafetensorsFile::Entry;
using Tensors = torch::OrderedDict<std::string, Tensor>;

constexpr const char* kMetadata = "__metadata__";
constexpr int64_t kLargestHeader = 100'000'000;  // as the reference implementation
constexpr int64_t kAlignment = 8;

const std::vector<std::pair<const char*, torch::ScalarType>>& dtypes() {
  static const std::vector<std::pair<const char*, torch::ScalarType>> table = {
      {"F64", torch::kDouble},    {"F32", torch::kFloat}, {"F16", torch::kHalf},
      {"BF16", torch::kBFloat16}, {"I64", torch::kLong},  {"I32", torch::kInt},
      {"I16", torch::kShort},     {"I8", torch::kChar},   {"U8", torch::kByte},
      {"BOOL", torch::kBool}};
  return table;
}

const char* code_of(torch::ScalarType dtype) {
  for (const auto& [code, type] : dtypes()) {
    if (type == dtype) return code;
  }
  return nullptr;
}

/// Parses and refuses keys that an object has twice, of which JSON readers silently drop one, and
/// more nesting than the format has: messages that print a value recurse into it.
Json parse_json(const std::string& text) {
  constexpr int kDeepest = 2;  // the file's object, a tensor's, its shape
  std::vector<std::set<std::string>> keys;
  return Json::parse(text, [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start)
      TORCH_CHECK(depth <= kDeepest, "its header is nested more deeply than the format has it");
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key) {
      const auto key = parsed.get<std::string>();
      TORCH_CHECK(keys.back().insert(key).second, "'", key, "' appears twice in its header");
    }
    return true;
  });
}

int64_t whole_number(const Json& value, const std::string& name) {
  TORCH_CHECK(
      value.is_number_unsigned() &&
          value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()),
      "'", name, "' has a size or offset that is not a whole number: ", value.dump());
  return static_cast<int64_t>(value.get<uint64_t>());
}

/// Bytes of a tensor. Raises c10::Error where they do not fit 63 bits.
int64_t byte_count(const Entry& entry) {
  auto bytes = static_cast<int64_t>(c10::elementSize(entry.dtype));
  if (std::find(entry.shape.begin(), entry.shape.end(), 0) != entry.shape.end()) bytes = 0;
  for (const int64_t size : entry.shape)
    TORCH_CHECK(!__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes), "'", entry.name,
                "' has a shape of more bytes than can be: ", at::IntArrayRef(entry.shape));
  return bytes;
}

Entry parse_entry(const std::string& name, const Json& value) {
  TORCH_CHECK(value.is_object() && value.size() == 3 && value.contains("dtype") &&
                  value.contains("shape") && value.contains("data_offsets"),
              "'", name, "' needs dtype, shape and data_offsets, has ", value.dump());
  Entry entry;
  entry.name = name;
  const auto& known = dtypes();
  const auto dtype = std::find_if(known.begin(), known.end(),
                                  [&](const auto& item) { return value["dtype"] == item.first; });
  TORCH_CHECK(dtype != known.end(), "'", name, "' has the dtype ", value["dtype"].dump(),
              ", which is not supported");
  entry.dtype = dtype->second;
  TORCH_CHECK(value["shape"].is_array(), "'", name, "' has the shape ", value["shape"].dump());
  for (const auto& size : value["shape"]) entry.shape.push_back(whole_number(size, name));
  const auto& offsets = value["data_offsets"];
  TORCH_CHECK(offsets.is_array() && offsets.size() == 2, "'", name, "' has the data_offsets ",
              offsets.dump());
  entry.begin = whole_number(offsets[0], name);
  entry.end = whole_number(offsets[1], name);
  TORCH_CHECK(entry.begin <= entry.end && entry.end - entry.begin == byte_count(entry), "'", name,
              "' has data_offsets ", offsets.dump(), " for shape ", at::IntArrayRef(entry.shape),
              " of ", entry.dtype);
  return entry;
}

/// The tensors' bytes follow each other from the first to the last of the file.
void check_offsets(const std::vector<Entry>& entries, int64_t data_size) {
  std::vector<const Entry*> sorted;
  for (const auto& entry : entries) sorted.push_back(&entry);
  std::sort(sorted.begin(), sorted.end(), [](const Entry* a, const Entry* b) {
    return std::make_pair(a->begin, a->end) < std::make_pair(b->begin, b->end);
  });
  int64_t next = 0;
  for (const auto* entry : sorted) {
    TORCH_CHECK(entry->begin == next, "'", entry->name, "' starts at byte ", entry->begin,
                " of the data where ", next, " is the next: tensors overlap or leave a hole");
    next = entry->end;
  }
  TORCH_CHECK(next == data_size, "it has ", data_size, " bytes of data, its header describes ",
              next);
}

/// Where each tensor's bytes go: wider elements first, so that all are aligned.
std::vector<Entry> plan(const Tensors& tensors) {
  std::vector<Entry> entries;
  for (const auto& item : tensors) {
    const auto& [name, tensor] = std::tie(item.key(), item.value());
    TORCH_CHECK_VALUE(name != kMetadata, "a tensor cannot be named '", kMetadata, "'");
    TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == torch::kStrided, "'", name,
                      "' is not a dense tensor");
    TORCH_CHECK_VALUE(code_of(tensor.scalar_type()) != nullptr, "'", name, "' has the dtype ",
                      tensor.scalar_type(), ", which safetensors does not have");
    entries.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), 0, 0});
  }
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return c10::elementSize(a.dtype) > c10::elementSize(b.dtype);
  });
  int64_t next = 0;
  for (auto& entry : entries) {
    entry.begin = next;
    entry.end = next += byte_count(entry);
  }
  return entries;
}

std::string header_of(const std::vector<Entry>& entries, const Tensors& tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::map<std::string, const Entry*> by_name;
  for (const auto& entry : entries) by_name[entry.name] = &entry;
  // Assigning to an ordered object looks for the key in all others; appending does not.
  Json::object_t header;
  auto& items = static_cast<std::vector<Json::object_t::value_type>&>(header);
  if (!metadata.empty()) items.emplace_back(kMetadata, Json(metadata));
  for (const auto& item : tensors) {
    const auto& entry = *by_name.at(item.key());
    Json value;
    value["dtype"] = code_of(entry.dtype);
    value["shape"] = entry.shape;
    value["data_offsets"] = {entry.begin, entry.end};
    items.emplace_back(entry.name, std::move(value));
  }
  auto text = Json(std::move(header)).dump();
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  TORCH_CHECK_VALUE(static_cast<int64_t>(text.size()) <= kLargestHeader, "the header of ",
                    text.size(), " bytes is larger than readers take");
  return text;
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::string path, const std::string& who)
    : what_(who + ": '" + path + "'") {
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  TORCH_CHECK(descriptor_ >= 0, what_, " cannot be opened: ", std::strerror(errno), ".");
  try {
    struct stat status = {};
    TORCH_CHECK(::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode),
                "it is not a regular file");
    uint64_t length = 0;
    constexpr int64_t kPrefix = sizeof length;
    TORCH_CHECK(status.st_size >= kPrefix, "it has only ", status.st_size, " bytes");
    read_bytes(&length, kPrefix, 0);
    TORCH_CHECK(length <= static_cast<uint64_t>(
                              std::min<int64_t>(kLargestHeader, status.st_size - kPrefix)),
                "its header should have ", length, " bytes, which is more than ",
                length > static_cast<uint64_t>(kLargestHeader) ? "allowed" : "the file has");
    std::string header(length, '\0');
    read_bytes(header.data(), static_cast<int64_t>(length), kPrefix);
    data_ = kPrefix + static_cast<int64_t>(length);
    parse(header, status.st_size - data_);
  } catch (const std::exception& error) {
    ::close(descriptor_);
    const auto* own = dynamic_cast<const c10::Error*>(&error);
    TORCH_CHECK(false, what_, " cannot be read as safetensors: ",
                own != nullptr ? own->what_without_backtrace() : error.what(), ".");
  }
}

SafetensorsFile::~SafetensorsFile() { ::close(descriptor_); }

void SafetensorsFile::parse(const std::string& header, int64_t data_size) {
  TORCH_CHECK(!header.empty() && header.front() == '{', "its header is not a JSON object");
  const auto json = parse_json(header);
  for (const auto& [name, value] : json.items()) {
    if (name == kMetadata) {
      TORCH_CHECK(value.is_object(), "its ", kMetadata, " is not an object");
      for (const auto& [key, text] : value.items()) {
        TORCH_CHECK(text.is_string(), "its ", kMetadata, " '", key, "' is not a string");
        metadata_[key] = text.get<std::string>();
      }
      continue;
    }
    index_[name] = entries_.size();
    entries_.push_back(parse_entry(name, value));
  }
  check_offsets(entries_, data_size);
}

const Entry* SafetensorsFile::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

void SafetensorsFile::read_bytes(void* into, int64_t size, int64_t position) const {
  auto* bytes = static_cast<char*>(into);
  while (size > 0) {
    const auto got = ::pread(descriptor_, bytes, static_cast<size_t>(size), position);
    if (got < 0 && errno == EINTR) continue;
    TORCH_CHECK(got > 0, what_,
                " cannot be read: ", got < 0 ? std::strerror(errno) : "it has become shorter", ".");
    bytes += got;
    size -= got;
    position += got;
  }
}

Tensor SafetensorsFile::read(const Entry& entry) const {
  if (entry.shape.empty()) {
    auto result = torch::empty({}, entry.dtype);
    read_bytes(result.data_ptr(), entry.end - entry.begin, data_ + entry.begin);
    return result;
  }
  return read(entry, 0, 0, entry.shape[0]);
}

Tensor SafetensorsFile::read(const Entry& entry, int64_t dim, int64_t offset, int64_t size) const {
  TORCH_CHECK_VALUE(dim >= 0 && dim < static_cast<int64_t>(entry.shape.size()) && offset >= 0 &&
                        size >= 0 && offset + size <= entry.shape[dim],
                    what_, ": '", entry.name, "' of shape ", at::IntArrayRef(entry.shape),
                    " has no [", offset, ", ", offset, " + ", size, ") along dimension ", dim);
  auto shape = entry.shape;
  shape[dim] = size;
  auto result = torch::empty(shape, entry.dtype);
  if (result.numel() == 0) return result;
  int64_t row = static_cast<int64_t>(c10::elementSize(entry.dtype));
  for (size_t d = dim + 1; d < shape.size(); ++d) row *= shape[d];
  const int64_t pieces = static_cast<int64_t>(result.nbytes()) / (size * row);
  auto* into = static_cast<char*>(result.data_ptr());
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t start = entry.begin + (piece * entry.shape[dim] + offset) * row;
    read_bytes(into + piece * size * row, size * row, data_ + start);
  }
  if (entry.dtype == torch::kBool) {
    const auto bytes = torch::from_blob(into, {result.numel()}, torch::kByte);
    TORCH_CHECK(bytes.max().item<uint8_t>() <= 1, what_, ": '", entry.name,
                "' is BOOL and has a byte that is neither 0 nor 1.");
  }
  return result;
}

void save_safetensors(const std::string& path, const Tensors& tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::vector<Entry> entries;
  std::string header;
  try {
    entries = plan(tensors);
    header = header_of(entries, tensors, metadata);
  } catch (const std::exception& error) {  // JSON demands UTF-8
    const auto* own = dynamic_cast<const c10::Error*>(&error);
    TORCH_CHECK_VALUE(false, "save_safetensors: '", path, "' cannot be written: ",
                      own != nullptr ? own->what_without_backtrace() : error.what());
  }
  AtomicFile file(path, "save_safetensors");
  const uint64_t length = header.size();
  file.write(&length, sizeof length);
  file.write(header.data(), header.size());
  for (const auto& entry : entries) {
    const auto dense = tensors[entry.name].detach().cpu().contiguous();
    file.write(dense.const_data_ptr(), dense.nbytes());
  }
  file.commit();
}

Tensors load_safetensors(const std::string& path) {
  const SafetensorsFile file(path, "load_safetensors");
  Tensors result;
  for (const auto& entry : file.entries()) result.insert(entry.name, file.read(entry));
  return result;
}

std::map<std::string, std::string> read_safetensors_metadata(const std::string& path) {
  return SafetensorsFile(path, "read_safetensors_metadata").metadata();
}

}  // namespace syncnorm
