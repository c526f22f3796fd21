#include "common/console.h"

#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>

namespace job {
namespace {

/// mpirun hands every rank a terminal of its own, whatever its output goes to, so under it the
/// parent's output counts.
bool output_is_terminal() {
  if (std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr) return isatty(STDOUT_FILENO) != 0;
  std::error_code error;
  const auto target =
      std::filesystem::read_symlink("/proc/" + std::to_string(getppid()) + "/fd/1", error).string();
  return !error && (target.rfind("/dev/pts/", 0) == 0 || target.rfind("/dev/tty", 0) == 0);
}

}  // namespace

Console::Console(std::string program, bool speaks, const std::string& progress)
    : program_(std::move(program)),
      speaks_(speaks),
      bars_(speaks && (progress == "bar" || (progress == "auto" && output_is_terminal()))) {}

void Console::clear_bar() {
  if (drawn_) std::cout << "\r\033[K" << std::flush;
  drawn_ = false;
}

void Console::line(const std::string& text) {
  if (!speaks_) return;
  clear_bar();
  std::cout << text << std::endl;
}

void Console::warn(const std::string& text) {
  if (!speaks_) return;
  clear_bar();
  std::cerr << program_ << ": " << text << std::endl;
}

void Console::bar(const std::string& label, double fraction, const std::string& tail) {
  if (!bars_) return;
  const auto now = std::chrono::steady_clock::now();
  if (drawn_ && now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  drawn_ = true;
  constexpr int kCells = 24;
  const int filled = static_cast<int>(std::clamp(fraction, 0.0, 1.0) * kCells);
  std::string cells;
  for (int i = 0; i < kCells; ++i) cells += i < filled ? "━" : "╌";
  std::cout << "\r\033[K" << label << " " << cells << format(" %3.0f%%  ", 100 * fraction) << tail
            << std::flush;
}

std::string format(const char* pattern, ...) {
  va_list arguments, again;
  va_start(arguments, pattern);
  va_copy(again, arguments);
  std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, pattern, arguments)), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, again);
  va_end(again);
  va_end(arguments);
  return text;
}

std::string duration_text(double seconds) {
  const auto whole = static_cast<long>(seconds + 0.5);
  if (whole < 60) return format("%ld s", whole);
  if (whole < 3600) return format("%ld:%02ld min", whole / 60, whole % 60);
  return format("%ld:%02ld:%02ld h", whole / 3600, whole / 60 % 60, whole % 60);
}

}  // namespace job
