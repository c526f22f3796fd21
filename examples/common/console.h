#pragma once

#include <chrono>
#include <string>

namespace job {

/// What rank 0 says: lines, and between them a progress bar where the output is a terminal. Silent
/// on other ranks.
class Console {
 public:
  /// `program` is the name before warnings; `progress` is bar, lines or auto.
  Console(std::string program, bool speaks, const std::string& progress);
  ~Console() { clear_bar(); }

  void line(const std::string& text);
  void warn(const std::string& text);

  /// Redraws the bar, ten times a second at most; does nothing where only lines are wanted.
  void bar(const std::string& label, double fraction, const std::string& tail);

  bool speaks() const { return speaks_; }

 private:
  void clear_bar();

  std::string program_;
  bool speaks_;
  bool bars_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_{};
};

/// Printf-style formatting into a string.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

/// "1:05", "1:02:03" or "12 s".
std::string duration_text(double seconds);

}  // namespace job
