#include "syncnorm/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "comm/fnv1a.h"
#include "parallel/agreement.h"
#include "parallel/safetensors_file.h"
#include "parallel/shard_checks.h"
#include "syncnorm/environment.h"
#include "syncnorm/safetensors.h"

namespace syncnorm {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using torch::Tensor;
using Metadata = std::map<std::string, std::string>;

constexpr const char* kReserved = "syncnorm.";
constexpr const char* kLayout = "syncnorm.checkpoint";
constexpr int kVersion = 1;

std::string rank_file(int rank) {
  char name[40];
  std::snprintf(name, sizeof name, "rank-%05d.safetensors", rank);
  return name;
}

/// The folder itself: without a slash at the end, and what it links to.
fs::path folder_of(const std::string& name) {
  TORCH_CHECK_VALUE(!name.empty(), "the name of the checkpoint's folder is empty");
  auto path = fs::absolute(name).lexically_normal();
  if (path.filename().empty()) path = path.parent_path();
  return fs::is_symlink(path) ? fs::canonical(path) : path;
}

fs::path beside(const fs::path& folder, const char* suffix) { return folder.string() + suffix; }

/// A folder that is going to be replaced holds nothing but a checkpoint.
void check_replaceable(const fs::path& folder) {
  if (!fs::exists(folder)) return;
  TORCH_CHECK(fs::is_directory(folder), "'", folder.string(), "' is there and is not a folder");
  for (const auto& item : fs::directory_iterator(folder)) {
    const auto name = item.path().filename().string();
    TORCH_CHECK(name.rfind("rank-", 0) == 0 && name.find(".safetensors") != std::string::npos, "'",
                folder.string(), "' also holds '", name,
                "', which is not of a checkpoint; name a folder of its own");
  }
}

/// A checkpoint is flat. remove_all would also do, but a program that links libtorch.so of the PyPI
/// wheel gets that library's copy of it, which crashes.
void remove_checkpoint(const fs::path& folder) {
  check_replaceable(folder);
  if (!fs::exists(folder)) return;
  std::vector<fs::path> files;
  for (const auto& item : fs::directory_iterator(folder)) files.push_back(item.path());
  for (const auto& file : files) fs::remove(file);
  fs::remove(folder);
}

void flush_folder(const fs::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;  // some file systems cannot; they order renames themselves
  ::fsync(descriptor);
  ::close(descriptor);
}

void put_in_place(const fs::path& part, const fs::path& folder) {
  flush_folder(part);
  const auto old = beside(folder, ".replaced");
  if (!fs::exists(folder)) {
    fs::rename(part, folder);
  } else if (::renameat2(AT_FDCWD, part.c_str(), AT_FDCWD, folder.c_str(), RENAME_EXCHANGE) == 0) {
    remove_checkpoint(part);
  } else {
    // Not every file system exchanges folders. Between the two renames loading finds the old one.
    TORCH_CHECK(errno == EINVAL || errno == ENOSYS || errno == ENOTSUP, "cannot replace '",
                folder.string(), "': ", std::strerror(errno));
    remove_checkpoint(old);
    fs::rename(folder, old);
    fs::rename(part, folder);
  }
  remove_checkpoint(old);
  flush_folder(folder.parent_path());
}

json layout_of(const std::vector<ShardedTensor>& tensors, int ranks) {
  json entries = json::object();
  for (const auto& [name, tensor, sharding] : tensors) {
    auto& entry = entries[name];
    entry["shape"] = sharding.whole_shape(tensor.sizes());
    if (sharding.replicated()) continue;
    entry["dim"] = sharding.dim;
    auto& by_rank = entry["ranges"] = json::array();
    for (const auto& rank : sharding.ranges) {
      by_rank.push_back(json::array());
      for (const auto& range : rank) by_rank.back().push_back({range.offset, range.size});
    }
  }
  return {{"version", kVersion}, {"ranks", ranks}, {"tensors", std::move(entries)}};
}

uint64_t fingerprint(const std::string& layout, const std::vector<ShardedTensor>& tensors) {
  auto text = layout;
  for (const auto& item : tensors) text += c10::toString(item.tensor.scalar_type());
  return fnv1a(text);
}

void write_rank_file(const fs::path& path, const std::vector<ShardedTensor>& tensors, int rank,
                     const Metadata& metadata) {
  torch::OrderedDict<std::string, Tensor> own;
  for (const auto& item : tensors) {
    if (rank == 0 || !item.sharding.replicated()) own.insert(item.name, item.tensor);
  }
  save_safetensors(path.string(), own, rank == 0 ? metadata : Metadata());
}

/// A checkpoint open for reading; the ranks' files as they are needed.
class StoredCheckpoint {
 public:
  struct Item {
    std::vector<int64_t> shape;  // of the whole
    std::optional<int64_t> dim;  // none: replicated, in the first file
    std::vector<std::vector<Range>> ranges;
  };

  StoredCheckpoint(const std::string& folder, std::string who)
      : who_(std::move(who)), folder_(find(folder_of(folder))) {
    const auto& metadata = file(0).metadata();
    const auto layout = metadata.find(kLayout);
    TORCH_CHECK(layout != metadata.end(), who_, ": '", folder_.string(),
                "' is not a checkpoint: its first file does not say how it is cut.");
    try {
      parse(json::parse(layout->second));
    } catch (const json::exception& error) {
      TORCH_CHECK(false, who_, ": '", folder_.string(),
                  "' does not say properly how it is cut: ", error.what(), ".");
    }
  }

  const std::map<std::string, Item>& items() const { return items_; }
  torch::ScalarType dtype(const std::string& name) { return entry(0, name).dtype; }

  Metadata user_metadata() {
    auto metadata = file(0).metadata();
    metadata.erase(kLayout);
    return metadata;
  }

  /// This rank's part of a tensor whose whole shape is the stored one.
  Tensor read(const ShardedTensor& wanted) {
    const auto& item = items_.at(wanted.name);
    const auto& sharding = wanted.sharding;
    if (item.shape.empty()) return file(0).read(entry(0, wanted.name));
    const int64_t axis = item.dim.value_or(sharding.replicated() ? 0 : sharding.dim);
    const bool direct = !sharding.replicated() && sharding.dim == axis;
    auto none = item.shape;
    none[axis] = 0;
    std::vector<Tensor> parts = {torch::empty(none, dtype(wanted.name))};
    const std::vector<Range> everything = {{0, item.shape[axis]}};
    for (const auto& range : direct ? sharding.ranges[sharding.comm->rank()] : everything)
      read_range(wanted.name, axis, range, parts);
    const auto joined = torch::cat(parts, axis);
    return direct ? joined : sharding.shard_of(joined);
  }

 private:
  struct Piece {
    int rank;
    int64_t offset;  // in that rank's shard
    int64_t size;    // to the end of the range there
  };

  fs::path find(const fs::path& folder) const {
    for (const auto& path : {folder, beside(folder, ".replaced")}) {
      if (fs::exists(path / rank_file(0))) return path;
    }
    TORCH_CHECK(false, who_, ": there is no checkpoint '", folder.string(), "'.");
  }

  SafetensorsFile& file(int rank) {
    auto& open = files_[rank];
    if (open == nullptr)
      open = std::make_unique<SafetensorsFile>((folder_ / rank_file(rank)).string(), who_);
    return *open;
  }

  const SafetensorsFile::Entry& entry(int rank, const std::string& name) {
    const auto* found = file(rank).find(name);
    const auto& item = items_.at(name);
    auto shape = item.shape;
    if (item.dim) {
      shape[*item.dim] = 0;
      for (const auto& range : item.ranges[rank]) shape[*item.dim] += range.size;
    }
    TORCH_CHECK(found != nullptr && found->shape == shape, who_, ": '", folder_.string(),
                "' is damaged: ", rank_file(rank), " does not have '", name, "' with shape ",
                at::IntArrayRef(shape), ".");
    return *found;
  }

  void parse(const json& layout) {
    const auto version = layout.at("version").get<int>();
    TORCH_CHECK(version == kVersion, who_, ": '", folder_.string(), "' is of version ", version,
                ", this program reads ", kVersion, ".");
    const auto ranks = layout.at("ranks").get<size_t>();
    for (const auto& [name, value] : layout.at("tensors").items()) {
      Item item;
      item.shape = value.at("shape").get<std::vector<int64_t>>();
      if (value.contains("dim")) {
        item.dim = value["dim"].get<int64_t>();
        for (const auto& rank : value.at("ranges")) {
          item.ranges.emplace_back();
          for (const auto& range : rank)
            item.ranges.back().push_back({range.at(0).get<int64_t>(), range.at(1).get<int64_t>()});
        }
        TORCH_CHECK(*item.dim >= 0 && *item.dim < static_cast<int64_t>(item.shape.size()) &&
                        item.ranges.size() == ranks,
                    who_, ": '", folder_.string(), "' does not say properly how '", name,
                    "' is cut.");
      }
      items_.emplace(name, std::move(item));
    }
  }

  Piece holder_of(const std::string& name, int64_t axis, int64_t position) const {
    const auto& item = items_.at(name);
    if (!item.dim) return {0, position, item.shape[axis] - position};
    for (size_t rank = 0; rank < item.ranges.size(); ++rank) {
      int64_t offset = 0;
      for (const auto& range : item.ranges[rank]) {
        const int64_t inside = position - range.offset;
        if (inside >= 0 && inside < range.size)
          return {static_cast<int>(rank), offset + inside, range.size - inside};
        offset += range.size;
      }
    }
    TORCH_CHECK(false, who_, ": '", folder_.string(), "' is damaged: no rank has position ",
                position, " of '", name, "'.");
  }

  void read_range(const std::string& name, int64_t axis, Range range, std::vector<Tensor>& parts) {
    while (range.size > 0) {
      const auto piece = holder_of(name, axis, range.offset);
      const int64_t size = std::min(piece.size, range.size);
      parts.push_back(file(piece.rank).read(entry(piece.rank, name), axis, piece.offset, size));
      range = {range.offset + size, range.size - size};
    }
  }

  std::string who_;
  fs::path folder_;
  std::map<int, std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Item> items_;
};

void check_fit(StoredCheckpoint& stored, const std::vector<ShardedTensor>& tensors,
               bool ignore_unexpected, const std::string& folder) {
  Mismatches problems;
  std::map<std::string, bool> wanted;
  for (const auto& [name, tensor, sharding] : tensors) {
    wanted[name] = true;
    const auto item = stored.items().find(name);
    if (item == stored.items().end()) {
      problems.missing(name);
      continue;
    }
    const auto shape = sharding.whole_shape(tensor.sizes());
    const auto dtype = stored.dtype(name);
    if (shape != item->second.shape) {
      problems.different(
          name, c10::str("whole ", at::IntArrayRef(item->second.shape), " in the checkpoint, ",
                         at::IntArrayRef(shape), " in the model"));
    } else if (!convertible(dtype, tensor.scalar_type())) {
      problems.different(
          name, c10::str(dtype, " in the checkpoint, ", tensor.scalar_type(), " in the model"));
    }
  }
  for (const auto& item : stored.items()) {
    if (!ignore_unexpected && wanted.count(item.first) == 0) problems.unexpected(item.first);
  }
  const auto text = problems.text();
  TORCH_CHECK(text.empty(), "load_checkpoint: '", folder, "' does not fit the model.", text,
              " Nothing was changed.");
}

}  // namespace

void save_checkpoint(const std::string& folder, const std::vector<ShardedTensor>& tensors,
                     const std::shared_ptr<Communicator>& comm, const Metadata& metadata) {
  constexpr const char* kWho = "save_checkpoint";
  const auto group = communicator_or_world(comm, kWho);
  const int rank = group->rank();
  auto all_metadata = metadata;
  fs::path target;
  agree(*group, kWho, [&] {
    check_shards(tensors, *group, kWho);
    for (const auto& item : metadata)
      TORCH_CHECK_VALUE(item.first.rfind(kReserved, 0) != 0, kWho, ": the metadata key '",
                        item.first, "' begins with ", kReserved, ", which is reserved");
    target = folder_of(folder);
    all_metadata[kLayout] = layout_of(tensors, group->size()).dump();
    return fingerprint(all_metadata[kLayout], tensors);
  });
  const auto part = beside(target, ".part");
  agree(*group, kWho, [&]() -> uint64_t {
    if (rank != 0) return 0;
    check_replaceable(target);
    remove_checkpoint(part);
    fs::create_directories(part);
    return 0;
  });
  try {
    agree(*group, kWho, [&]() -> uint64_t {
      write_rank_file(part / rank_file(rank), tensors, rank, all_metadata);
      return 0;
    });
  } catch (const c10::Error&) {
    try {
      if (rank == 0) remove_checkpoint(part);
    } catch (const std::exception&) {  // the next save tries again; the first error is to be told
    }
    throw;
  }
  agree(*group, kWho, [&]() -> uint64_t {
    if (rank == 0) put_in_place(part, target);
    return 0;
  });
}

void load_checkpoint(const std::string& folder, const std::vector<ShardedTensor>& tensors,
                     const std::shared_ptr<Communicator>& comm, bool ignore_unexpected) {
  constexpr const char* kWho = "load_checkpoint";
  const auto group = communicator_or_world(comm, kWho);
  std::vector<Tensor> values;
  agree(*group, kWho, [&]() -> uint64_t {
    check_shards(tensors, *group, kWho);
    StoredCheckpoint stored(folder, kWho);
    check_fit(stored, tensors, ignore_unexpected, folder);
    for (const auto& item : tensors) values.push_back(stored.read(item));
    return 0;
  });
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto tensor = tensors[i].tensor;
    tensor.copy_(values[i]);
  }
}

Metadata read_checkpoint_metadata(const std::string& folder) {
  return StoredCheckpoint(folder, "read_checkpoint_metadata").user_metadata();
}

}  // namespace syncnorm
