#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl/communicator.h"
#include "comm/timeout.h"
#include "support/fake_nccl.h"
#include "support/world.h"

namespace syncnorm::testing {

constexpr double kSoon = 1;  ///< seconds, for operations that are to time out

inline void expect_words(const std::string& message, const std::vector<std::string>& words) {
  for (const auto& word : words)
    EXPECT_NE(message.find(word), std::string::npos) << "no '" << word << "' in: " << message;
}

/// A rank of a job over the fake, which every test leaves tidy.
class NcclTest : public ::testing::Test {
 protected:
  std::shared_ptr<Communicator> make(double timeout = 60, c10::Device device = torch::kCPU) {
    return nccl::make_communicator(fake.backend(timeout), world, device);
  }

  void TearDown() override {
    comm.reset();
    EXPECT_EQ(fake.created, fake.destroyed + fake.aborted);
    EXPECT_EQ(fake.events_created, fake.events_destroyed);
    EXPECT_EQ(fake.misuses, 0);
    EXPECT_FALSE(operation_abandoned());
  }

  /// Waits until the watching thread has aborted; the job goes on, as no other test's would.
  void wait_for_abort() {
    for (int i = 0; fake.aborted == 0 && i < 3000; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    ASSERT_EQ(fake.aborted, 1);
  }

  /// A failure ends the job unless somebody says that it does not.
  void forgive() {
    EXPECT_TRUE(operation_abandoned());
    note_late_completion();
  }

  std::vector<int64_t> uneven_sizes() const {
    std::vector<int64_t> sizes(size);
    for (int r = 0; r < size; ++r) sizes[r] = (r * 3 + 2) % 4;  // 2 1 0 3: one without rows
    return sizes;
  }

  /// rank r contributes r + i; small integers are exact in every dtype.
  static torch::Tensor contribution(int r, int64_t n, torch::ScalarType dtype) {
    return (torch::arange(n) % 7 + r).to(dtype);
  }
  torch::Tensor expected_sum(int64_t n, torch::ScalarType dtype) const {
    return ((torch::arange(n) % 7) * size + size * (size - 1) / 2).to(dtype);
  }

  FakeNccl& fake = FakeNccl::renew();
  std::shared_ptr<Communicator> world = new_world();
  int rank = world->rank();
  int size = world->size();
  std::shared_ptr<Communicator> comm;
};

}  // namespace syncnorm::testing
