#pragma once

#include <utility>

namespace syncnorm {

/// While it lives, what this thread sends carries a tag by which the ranks see that they mean the
/// same thing, and a transport need not find out beforehand.
class TaggedPayload {
 public:
  TaggedPayload() : previous_(std::exchange(active_, true)) {}
  ~TaggedPayload() { active_ = previous_; }
  TaggedPayload(const TaggedPayload&) = delete;
  TaggedPayload& operator=(const TaggedPayload&) = delete;
  static bool active() { return active_; }

 private:
  static inline thread_local bool active_ = false;
  bool previous_;
};

}  // namespace syncnorm
