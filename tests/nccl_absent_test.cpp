// What a library built without NCCL says when it is asked for it.
#include <gtest/gtest.h>

#include "support/world.h"
#include "syncnorm/nccl.h"

namespace syncnorm {
namespace {

TEST(NcclAbsent, SaysSoOnEveryRank) {
  const auto world = testing::new_world();
  const auto message = testing::message_of<c10::Error>(
      [&] { nccl_communicator(world, c10::Device(torch::kCUDA, 0)); });
  EXPECT_NE(message.find("built without NCCL"), std::string::npos) << message;
}

}  // namespace
}  // namespace syncnorm
