#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "syncnorm/communicator.h"

namespace syncnorm::bench {

/// What a slower network would add to every collective.
struct Link {
  double seconds = 0;           ///< for each collective
  double seconds_per_byte = 0;  ///< of what a rank hands in
  /// Leave the core to other threads meanwhile. What runs next then finds colder caches; without,
  /// the wait is all that is added.
  bool sleeps = false;
};

/// Returns `seconds` from now. A sleep ends up to 150 us late, so the last of it is polled.
inline void wait_precisely(double seconds, bool sleeps) {
  using Clock = std::chrono::steady_clock;
  if (seconds <= 0) return;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(seconds));
  if (sleeps) std::this_thread::sleep_until(end - std::chrono::microseconds(150));
  while (Clock::now() < end) std::this_thread::yield();
}

/// `inner` behind a slower link: every collective first waits, then is done by `inner`. Groups
/// split off it are as slow.
class DelayedCommunicator final : public Communicator {
 public:
  DelayedCommunicator(std::shared_ptr<Communicator> inner, Link link)
      : Communicator(inner->rank(), inner->size(), "delayed " + inner->name()),
        inner_(std::move(inner)),
        link_(link) {}

  void set_link(Link link) { link_ = link; }

 private:
  void wait_for(int64_t bytes) const {
    wait_precisely(link_.seconds + link_.seconds_per_byte * static_cast<double>(bytes),
                   link_.sleeps);
  }
  void wait_for(const at::Tensor& tensor) const { wait_for(static_cast<int64_t>(tensor.nbytes())); }

  void do_all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    wait_for(tensor);
    inner_->all_reduce(tensor, op);
  }
  at::Tensor do_all_gather(const at::Tensor& shard, at::IntArrayRef sizes) override {
    wait_for(shard);
    return inner_->all_gather(shard, sizes);
  }
  at::Tensor do_reduce_scatter(const at::Tensor& tensor, at::IntArrayRef sizes) override {
    wait_for(tensor);
    return inner_->reduce_scatter(tensor, sizes);
  }
  void do_broadcast(const at::Tensor& tensor, int root) override {
    wait_for(tensor);
    inner_->broadcast(tensor, root);
  }
  void do_barrier() override {
    wait_for(0);
    inner_->barrier();
  }
  std::shared_ptr<Communicator> do_split(int color, int key) override {
    auto part = inner_->split(color, key);
    return part == nullptr ? nullptr : std::make_shared<DelayedCommunicator>(part, link_);
  }

  std::shared_ptr<Communicator> inner_;
  Link link_;
};

}  // namespace syncnorm::bench
