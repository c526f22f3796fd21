#include "comm/board_line.h"

#include <utility>

namespace syncnorm {

BoardLine::BoardLine(uint64_t uid, std::vector<int> world_ranks, int rank)
    : uid_(uid), world_ranks_(std::move(world_ranks)), rank_(rank) {
  if (auto* board = StatusBoard::current()) line_ = board->open_line(uid_);
}

BoardLine::Entered::Entered(const BoardLine& line, uint64_t sequence, const std::string& operation)
    : line_(line) {
  if (auto* board = StatusBoard::current(); board != nullptr && line.line_ >= 0)
    board->enter(line.line_, line.uid_, sequence, operation);
}

BoardLine::Entered::~Entered() {
  if (auto* board = StatusBoard::current(); board != nullptr && line_.line_ >= 0)
    board->leave(line_.line_);
}

void BoardLine::fail(uint64_t sequence) const {
  if (auto* board = StatusBoard::current(); board != nullptr && line_ >= 0)
    board->fail(line_, sequence);
}

std::string BoardLine::peers_in(StatusBoard::Fate fate, uint64_t sequence) const {
  std::string text;
  const auto* board = StatusBoard::current();
  for (int r = 0; board != nullptr && r < static_cast<int>(world_ranks_.size()); ++r)
    if (r != rank_ && board->fate(world_ranks_[r], uid_, sequence) == fate)
      text += (text.empty() ? "rank " : ", rank ") + std::to_string(r);
  return text;
}

std::string BoardLine::absentees(uint64_t sequence) const {
  const auto* board = StatusBoard::current();
  if (board == nullptr)
    return "; which rank is missing is not known without a syncnorm::Environment";
  std::string text;
  for (int r = 0; r < static_cast<int>(world_ranks_.size()); ++r) {
    if (r == rank_) continue;
    const auto line = board->describe(world_ranks_[r], "rank " + std::to_string(r), uid_, sequence);
    if (!line.empty()) text += "; " + line;
  }
  return text;
}

}  // namespace syncnorm
