#pragma once

#include <algorithm>
#include <vector>

#include "kernels/cpu/loops.h"

namespace syncnorm::kernels {

/// Zeros [rows, length], each row beginning on a cache line, padded(length) after the one before.
template <typename A>
class Lines {
 public:
  Lines(int64_t rows, int64_t length)
      : stride_(loops::padded<A>(length)), lines_(rows * stride_ / kEach) {}

  A* row(int64_t r) { return reinterpret_cast<A*>(lines_.data()) + r * stride_; }
  const A* row(int64_t r) const { return reinterpret_cast<const A*>(lines_.data()) + r * stride_; }
  void clear() { std::fill(lines_.begin(), lines_.end(), Line()); }

 private:
  static constexpr int64_t kEach = loops::kLine / sizeof(A);
  struct alignas(loops::kLine) Line {
    A values[kEach] = {};
  };

  int64_t stride_;
  std::vector<Line> lines_;
};

}  // namespace syncnorm::kernels
