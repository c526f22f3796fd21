#include "comm/status_board.h"

#include <algorithm>
#include <cstdio>
#include <new>

#include "comm/mpi_check.h"

namespace syncnorm {
namespace {

StatusBoard* living = nullptr;

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds);
  return text;
}

}  // namespace

StatusBoard* StatusBoard::current() { return living; }

StatusBoard::StatusBoard() {
  MPI_Comm node = MPI_COMM_NULL;
  int world_rank = 0;
  int size = 0;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &world_rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node),
            "MPI_Comm_split_type");
  check_mpi(MPI_Comm_size(node, &size), "MPI_Comm_size");
  void* base = nullptr;
  check_mpi(MPI_Win_allocate_shared(sizeof(Rank), 1, MPI_INFO_NULL, node, &base, &window_),
            "MPI_Win_allocate_shared");
  mine_ = new (base) Rank();
  mine_->phase = static_cast<int>(Phase::running);
  for (auto& line : mine_->lines) line.uid = 0;
  world_ranks_.resize(size);
  check_mpi(MPI_Allgather(&world_rank, 1, MPI_INT, world_ranks_.data(), 1, MPI_INT, node),
            "MPI_Allgather");
  for (int r = 0; r < size; ++r) {
    MPI_Aint bytes = 0;
    int unit = 0;
    void* other = nullptr;
    check_mpi(MPI_Win_shared_query(window_, r, &bytes, &unit, &other), "MPI_Win_shared_query");
    node_.push_back(static_cast<Rank*>(other));
  }
  check_mpi(MPI_Comm_free(&node), "MPI_Comm_free");
  living = this;
}

void StatusBoard::release() {
  if (living == this) living = nullptr;
  if (window_ != MPI_WIN_NULL) MPI_Win_free(&window_);
}

int StatusBoard::open_line(uint64_t uid) {
  const int line = opened_++ % kLines;
  mine_->lines[line].next_sequence = 0;
  mine_->lines[line].failed_sequence = 0;
  mine_->lines[line].inside = false;
  mine_->lines[line].uid = uid;
  return line;
}

void StatusBoard::enter(int line, uint64_t uid, uint64_t sequence, const std::string& operation) {
  auto& entry = mine_->lines[line];
  ++entry.version;
  if (entry.uid != uid) entry.failed_sequence = 0;  // the line changes hands
  entry.uid = uid;
  const auto length = std::min<size_t>(operation.size(), kText - 1);
  for (size_t i = 0; i < length; ++i) entry.text[i].store(operation[i], std::memory_order_relaxed);
  entry.text[length].store('\0', std::memory_order_relaxed);
  entry.next_sequence = sequence + 1;
  entry.since = MPI_Wtime();
  entry.inside = true;
  ++entry.version;
}

void StatusBoard::leave(int line) {
  mine_->lines[line].since = MPI_Wtime();
  mine_->lines[line].inside = false;
}

void StatusBoard::fail(int line, uint64_t sequence) {
  mine_->lines[line].failed_sequence = sequence + 1;
}

void StatusBoard::set_phase(Phase phase) { mine_->phase = static_cast<int>(phase); }

const StatusBoard::Rank* StatusBoard::find(int world_rank) const {
  const auto found = std::find(world_ranks_.begin(), world_ranks_.end(), world_rank);
  return found == world_ranks_.end() ? nullptr : node_[found - world_ranks_.begin()];
}

const StatusBoard::Line* StatusBoard::find_line(const Rank& rank, uint64_t uid) const {
  for (const auto& line : rank.lines)
    if (line.uid == uid) return &line;
  return nullptr;
}

std::string StatusBoard::text_of(const Line& line) {
  for (int attempt = 0; attempt < 10; ++attempt) {
    const uint64_t before = line.version;
    std::string text;
    for (const auto& c : line.text) {
      const char value = c.load(std::memory_order_relaxed);
      if (value == '\0') break;
      text.push_back(value);
    }
    if (before % 2 == 0 && before == line.version) return text;
  }
  return "an operation it is just entering";
}

StatusBoard::Fate StatusBoard::fate(int rank, uint64_t uid, uint64_t sequence) const {
  const Rank* entry = find(rank);
  if (entry == nullptr) return Fate::running;
  const Line* line = find_line(*entry, uid);
  // A communicator that failed is given up: its rank comes to no later operation either.
  const uint64_t failed = line == nullptr ? 0 : line->failed_sequence.load();
  if (failed != 0 && failed <= sequence + 1) return Fate::failed;
  if (entry->phase == static_cast<int>(Phase::running)) return Fate::running;
  return line == nullptr || line->next_sequence <= sequence ? Fate::ended : Fate::running;
}

std::string StatusBoard::describe(int rank, const std::string& label, uint64_t uid,
                                  uint64_t sequence) const {
  const Rank* entry = find(rank);
  if (entry == nullptr) return label + " is on another node: see its own report";
  const Line* own = find_line(*entry, uid);
  if (own != nullptr && own->next_sequence > sequence) return "";
  std::string text = label + " has not entered it";
  if (entry->phase == static_cast<int>(Phase::finalizing))
    return text + ": it has left its main program";
  if (entry->phase == static_cast<int>(Phase::failed)) return text + ": it has failed";
  const Line* latest = nullptr;
  for (const auto& line : entry->lines)
    if (line.next_sequence > 0 && (latest == nullptr || line.since > latest->since)) latest = &line;
  if (latest == nullptr) return text + ": it has not communicated yet";
  const auto age = seconds_text(MPI_Wtime() - latest->since);
  if (latest->inside) return text + ": it has been waiting for " + age + " in " + text_of(*latest);
  return text + ": last seen leaving " + text_of(*latest) + " " + age + " ago";
}

}  // namespace syncnorm
