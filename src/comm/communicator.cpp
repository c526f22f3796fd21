#include "syncnorm/communicator.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "comm/fnv1a.h"
#include "comm/reduction.h"
#include "comm/signature.h"
#include "comm/timeout.h"

namespace syncnorm {
namespace {

// Room for a signature and its length in a diagnostic gather; a longer one takes a second gather.
constexpr int64_t kFingerprintBytes = 512;

thread_local std::string current_module;

bool full_checks() {
  static const bool full = [] {
    const char* value = std::getenv("SYNCNORM_CHECK");
    return value != nullptr && std::string(value) == "full";
  }();
  return full;
}

/// A record of `room` bytes: the text's length, and as much of it as fits.
at::Tensor to_record(const std::string& text, int64_t room) {
  auto record = at::zeros({1, room}, at::kByte);
  auto* data = record.mutable_data_ptr<uint8_t>();
  const auto length = static_cast<int64_t>(text.size());
  std::memcpy(data, &length, sizeof length);
  std::memcpy(data + sizeof length, text.data(), std::min<size_t>(length, room - sizeof length));
  return record;
}

int64_t length_in(const uint8_t* record) {
  int64_t length = 0;
  std::memcpy(&length, record, sizeof length);
  return length;
}

/// All ranks' texts, where `gather(record, all)` joins the ranks' records. False where
/// that does not succeed in time.
template <typename Gather>
bool gather_texts(const std::string& mine, std::vector<std::string>* texts, const Gather& gather) {
  constexpr auto kLength = static_cast<int64_t>(sizeof(int64_t));
  int64_t room = 0, needed = kFingerprintBytes;
  at::Tensor all;
  while (needed > room) {  // all ranks see the same lengths, so they go round alike
    room = needed;
    if (!gather(to_record(mine, room), all)) return false;
    for (int64_t r = 0; r < all.size(0); ++r)
      needed = std::max(needed, length_in(all.const_data_ptr<uint8_t>() + r * room) + kLength);
  }
  for (int64_t r = 0; r < all.size(0); ++r) {
    const auto* record = all.const_data_ptr<uint8_t>() + r * room;
    texts->emplace_back(reinterpret_cast<const char*>(record + kLength), length_in(record));
  }
  return true;
}

int64_t sum(at::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

/// Of the rows by rank, which must agree: each rank places the others' by them.
int64_t hash_of(at::IntArrayRef sizes) {
  return static_cast<int64_t>(
      fnv1a({reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(int64_t)}));
}

const char* name_of_detail(std::string_view kind) {
  if (kind == "broadcast") return "root";
  return kind == "all_reduce" ? "reduction" : "rows by rank (hash)";
}

void check_tensor(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK(tensor.defined(), what, ": the tensor is undefined");
  TORCH_CHECK(tensor.layout() == at::kStrided, what, ": needs a dense tensor, got layout ",
              tensor.layout());
}

void check_sizes(at::IntArrayRef sizes, int ranks, const char* what) {
  TORCH_CHECK(static_cast<int>(sizes.size()) == ranks, what, ": needs one size for each of ", ranks,
              " ranks, got ", sizes.size());
  for (const int64_t size : sizes) TORCH_CHECK(size >= 0, what, ": negative size in ", sizes);
}

}  // namespace

ModuleScope::ModuleScope(std::string name)
    : previous_(std::exchange(current_module, std::move(name))) {}
ModuleScope::~ModuleScope() { current_module = std::move(previous_); }
const std::string& ModuleScope::current() { return current_module; }

Communicator::Communicator(int rank, int size, std::string name)
    : rank_(rank), size_(size), name_(std::move(name)) {}

std::string Communicator::describe_operation() const {
  std::string text;
  text.reserve(64 + operation_.module.size() + name_.size());
  text.append(operation_.kind).append(" #").append(std::to_string(operation_.sequence));
  if (!operation_.module.empty()) text.append(" of ").append(operation_.module);
  text.append(" on ").append(name_).append(", rank ").append(std::to_string(rank_));
  return text.append(" of ").append(std::to_string(size_));
}

template <typename F>
auto Communicator::run(const char* kind, const at::Tensor& payload, int64_t detail, F&& body) {
  const at::NoGradGuard no_grad;
  if (!failure_.empty())
    throw CommunicationError(std::string(kind) + " on " + name_ + ", rank " +
                             std::to_string(rank_) +
                             ": this communicator failed before: " + failure_);
  operation_ = {kind, current_module, sequence_++};
  try {
    if (full_checks() && size_ > 1) check_fingerprints(kind, payload, detail);
    details_.clear();
    counters_.bytes += payload.defined() ? static_cast<int64_t>(payload.nbytes()) : 0;
    return body();
  } catch (const CommunicationError& error) {
    failure_ = error.what();
    throw;
  }
}

void Communicator::check_fingerprints(const char* kind, const at::Tensor& payload, int64_t detail) {
  Signature mine;
  mine.add("operation", kind).add("module", operation_.module).add("sequence", operation_.sequence);
  mine.append(details_).add(name_of_detail(kind), detail);
  // all_gather may differ in the rows each rank brings, never in the rest of the shape.
  const bool by_row = std::strcmp(kind, "all_gather") == 0;
  if (payload.defined()) {
    mine.add("wire dtype", c10::toString(payload.scalar_type()));
    const auto extents = payload.sizes().slice(by_row ? 1 : 0);
    mine.add(by_row ? "elements a row" : "elements", c10::multiply_integers(extents));
  }
  std::vector<std::string> texts;
  if (!gather_texts(mine.text(), &texts, [&](const at::Tensor& record, at::Tensor& all) {
        return gather_diagnostics(record, all, timeout_seconds());
      }))
    throw CommunicationError(describe_operation() +
                             ": timed out waiting for the other ranks' fingerprints");
  const auto differences = describe_differences(texts);
  if (!differences.empty())
    throw CommunicationError(describe_operation() + ": the ranks disagree: " + differences);
}

void Communicator::raise_disagreement(const std::string& mine) {
  constexpr double kSeconds =
      5;  // the others raise too and join at once, unless their transport failed
  announce_failure();
  std::string differences;
  std::vector<std::string> texts;
  try {
    if (gather_texts(mine, &texts, [&](const at::Tensor& record, at::Tensor& all) {
          return gather_diagnostics(record, all, kSeconds);
        }))
      differences = describe_differences(texts);
  } catch (const std::exception&) {
    differences.clear();  // the transport is gone as well: the general message has to do
  }
  if (differences.empty())
    differences = "which ranks and what is not known; SYNCNORM_CHECK=full names them";
  if (differences.find("module differs") != std::string::npos)
    differences +=
        " (modules without a name are numbered as they are made: make them alike on every rank, or "
        "name them)";
  failure_ =
      describe_operation() + ": the ranks disagree: " + differences + ". This rank has " + mine;
  throw CommunicationError(failure_);
}

bool Communicator::gather_diagnostics(const at::Tensor& mine, at::Tensor& all, double /*seconds*/) {
  const std::vector<int64_t> ones(size_, 1);
  all = do_all_gather(mine, ones);
  return true;
}

void Communicator::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  check_tensor(tensor, "all_reduce");
  check_reducible(tensor.scalar_type(), "all_reduce");
  run("all_reduce", tensor, static_cast<int64_t>(op), [&] {
    ++counters_.all_reduce;
    // No need of a detached alias where neither autograd nor inference mode minds writing.
    const bool plain = !tensor.requires_grad() && !tensor.is_inference();
    const auto target = plain ? tensor : tensor.detach();
    const auto dense = target.contiguous();
    do_all_reduce(dense, op);
    if (!dense.is_alias_of(target)) target.copy_(dense);
    return 0;
  });
}

at::Tensor Communicator::all_gather(const at::Tensor& shard, at::IntArrayRef sizes) {
  check_tensor(shard, "all_gather");
  check_sizes(sizes, size_, "all_gather");
  TORCH_CHECK(shard.dim() > 0 && shard.size(0) == sizes[rank_], "all_gather: rank ", rank_,
              " was announced ", sizes[rank_], " rows and brings shape ", shard.sizes());
  return run("all_gather", shard, hash_of(sizes), [&] {
    ++counters_.all_gather;
    return do_all_gather(shard.detach().contiguous(), sizes);
  });
}

at::Tensor Communicator::reduce_scatter(const at::Tensor& tensor, at::IntArrayRef sizes) {
  check_tensor(tensor, "reduce_scatter");
  check_reducible(tensor.scalar_type(), "reduce_scatter");
  check_sizes(sizes, size_, "reduce_scatter");
  TORCH_CHECK(tensor.dim() > 0 && tensor.size(0) == sum(sizes), "reduce_scatter: sizes ", sizes,
              " add up to ", sum(sizes), " rows, the tensor has shape ", tensor.sizes());
  return run("reduce_scatter", tensor, hash_of(sizes), [&] {
    ++counters_.reduce_scatter;
    return do_reduce_scatter(tensor.detach().contiguous(), sizes);
  });
}

void Communicator::broadcast(const at::Tensor& tensor, int root) {
  check_tensor(tensor, "broadcast");
  TORCH_CHECK(root >= 0 && root < size_, "broadcast: root ", root, " is not a rank of ", name_,
              " (", size_, " ranks)");
  run("broadcast", tensor, root, [&] {
    ++counters_.broadcast;
    const auto target = tensor.detach();
    const auto dense = target.contiguous();
    do_broadcast(dense, root);
    if (!dense.is_alias_of(target)) target.copy_(dense);
    return 0;
  });
}

void Communicator::barrier() {
  run("barrier", {}, 0, [&] {
    ++counters_.barrier;
    do_barrier();
    return 0;
  });
}

std::shared_ptr<Communicator> Communicator::split(int color, int key) {
  return run("split", {}, 0, [&] { return do_split(color, key); });
}

}  // namespace syncnorm
