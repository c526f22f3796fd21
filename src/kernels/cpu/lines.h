#pragma once

#include <memory>

#include "kernels/cpu/loops.h"

namespace syncnorm::kernels {

/// Memory for values [rows, length], each row beginning on a cache line, padded(length) after the
/// one before. Not set: zeroing wide rows takes as long as a pass over one.
template <typename A>
class Lines {
 public:
  Lines(int64_t rows, int64_t length)
      : stride_(loops::padded<A>(length)), lines_(new Line[rows * stride_ / kEach]) {}

  A* row(int64_t r) { return reinterpret_cast<A*>(lines_.get()) + r * stride_; }
  const A* row(int64_t r) const { return reinterpret_cast<const A*>(lines_.get()) + r * stride_; }

 private:
  static constexpr int64_t kEach = loops::kLine / sizeof(A);
  struct alignas(loops::kLine) Line {
    A values[kEach];
  };

  int64_t stride_;
  std::unique_ptr<Line[]> lines_;
};

}  // namespace syncnorm::kernels
