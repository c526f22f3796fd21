#pragma once

#include <mpi.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace syncnorm {

/// Memory shared by the ranks of a node, in which each writes what it is waiting for, so that a
/// rank that has waited too long can say who is missing. Writing costs some nanoseconds and no
/// system call; nobody waits for it.
///
/// Owned by Environment; without one (or for ranks on other nodes) the reports just know less.
class StatusBoard {
 public:
  enum class Phase : int { running, finalizing, failed };

  /// Collective over MPI_COMM_WORLD.
  StatusBoard();
  /// Collective too: call it before MPI_Finalize.
  void release();

  /// The living board, or null.
  static StatusBoard* current();

  /// Where one communicator's operations are noted. `uid` is equal on all its ranks.
  int open_line(uint64_t uid);
  void enter(int line, uint64_t uid, uint64_t sequence, const std::string& operation);
  void leave(int line);
  void fail(int line, uint64_t sequence);
  void set_phase(Phase phase);

  /// What became of world rank `rank` with regard to operation `sequence` of `uid`, as far as it is
  /// visible from here: it is ending and has not entered, or the transport failed it there, or
  /// neither.
  enum class Fate { running, ended, failed };
  Fate fate(int rank, uint64_t uid, uint64_t sequence) const;

  /// "rank 2 has not entered it: last seen leaving all_reduce #3 of bn1 12.1 s ago", or "" if that
  /// rank is in it or past it. `rank` is the world rank, `label` how the message calls it.
  std::string describe(int rank, const std::string& label, uint64_t uid, uint64_t sequence) const;

  static constexpr int kLines =
      16;  // communicators noted a rank; the oldest line is reused past that
  static constexpr int kText = 160;

 private:
  struct Line {
    std::atomic<uint64_t> version;  // odd while the line is being written
    std::atomic<uint64_t> uid;
    std::atomic<uint64_t> next_sequence;    // one past the last operation entered
    std::atomic<uint64_t> failed_sequence;  // one past the operation that failed, 0 where none did
    std::atomic<double> since;
    std::atomic<bool> inside;
    std::array<std::atomic<char>, kText> text;
  };
  struct Rank {
    std::atomic<int> phase;
    Line lines[kLines];
  };
  const Rank* find(int world_rank) const;
  const Line* find_line(const Rank& rank, uint64_t uid) const;
  static std::string text_of(const Line& line);

  MPI_Win window_ = MPI_WIN_NULL;
  Rank* mine_ = nullptr;
  std::vector<Rank*> node_;       // by rank on this node
  std::vector<int> world_ranks_;  // of those
  std::atomic<int> opened_{0};
};

}  // namespace syncnorm
