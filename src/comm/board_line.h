#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/status_board.h"

namespace syncnorm {

/// One communicator's place on the status board. Does nothing and knows nothing where no
/// Environment keeps a board.
class BoardLine {
 public:
  /// `uid` is equal on all ranks of the communicator and no other's; `world_ranks[r]` is rank r's
  /// number in MPI_COMM_WORLD.
  BoardLine(uint64_t uid, std::vector<int> world_ranks, int rank);

  /// While it lives, the board shows this rank inside the operation.
  class Entered {
   public:
    Entered(const BoardLine& line, uint64_t sequence, const std::string& operation);
    ~Entered();
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

   private:
    const BoardLine& line_;
  };

  /// This rank is about to raise from the operation.
  void fail(uint64_t sequence) const;

  /// "rank 1, rank 3": the other ranks that met `fate` in operation `sequence`, as far as is known.
  std::string peers_in(StatusBoard::Fate fate, uint64_t sequence) const;

  /// "; rank 1 has not entered it: ...; rank 2 ...": the other ranks that are not known to have
  /// come to operation `sequence`.
  std::string absentees(uint64_t sequence) const;

 private:
  uint64_t uid_;
  std::vector<int> world_ranks_;
  int rank_;
  int line_ = -1;
};

}  // namespace syncnorm
