// Ranks that mean different things raise, all of them, and say what differs. Each test has a
// communicator of its own, which is broken afterwards.
#include <gtest/gtest.h>

#include "comm/signature.h"
#include "support/world.h"
#include "syncnorm/linear.h"
#include "syncnorm/sync_batch_norm.h"

namespace syncnorm {
namespace {

using testing::message_of;
using testing::new_world;

class DisagreementTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (comm->size() == 1) GTEST_SKIP() << "needs two ranks";
    odd = comm->rank() == 1;
  }

  template <typename F>
  void expect(F&& body, const std::vector<std::string>& words) {
    const auto message = message_of<CommunicationError>(body);
    for (const auto& word : words)
      EXPECT_NE(message.find(word), std::string::npos) << "no '" << word << "' in: " << message;
    EXPECT_THROW(comm->barrier(), CommunicationError);  // broken for good
  }

  SyncBatchNorm make(const std::string& name, int64_t channels = 3) {
    return SyncBatchNorm(SyncBatchNormOptions(channels).communicator(comm).name(name));
  }

  std::shared_ptr<Communicator> comm = new_world();
  bool odd = false;
};

TEST_F(DisagreementTest, LayersInAnotherOrder) {
  auto first = make("first");
  auto second = make("second");
  expect(
      [&] {
        (odd ? second : first)->forward(torch::randn({2, 3}));
      },
      {"module differs", "rank 1 has second", "first", "all_reduce #0"});
}

TEST_F(DisagreementTest, UnnamedLayersInAnotherOrder) {
  SyncBatchNorm first(SyncBatchNormOptions(3).communicator(comm));
  SyncBatchNorm second(SyncBatchNormOptions(3).communicator(comm));
  expect(
      [&] {
        (odd ? second : first)->forward(torch::randn({2, 3}));
      },
      {"module differs", "SyncBatchNorm-"});
}

TEST_F(DisagreementTest, SkippedLayer) {
  auto a = make("a");
  auto b = make("b");
  expect(
      [&] {
        if (!odd) a->forward(torch::randn({2, 3}));
        b->forward(torch::randn({2, 3}));
      },
      {"module differs", "rank 1 has b"});
}

TEST_F(DisagreementTest, AnotherEps) {
  auto module = make("bn");
  if (odd) module->options.eps(1e-3);
  expect(
      [&] {
        module->forward(torch::randn({2, 3}));
      },
      {"eps differs", "rank 1 has 0.001", "of bn"});
}

TEST_F(DisagreementTest, AnotherDtype) {
  auto module = make("bn");
  expect(
      [&] {
        module->forward(torch::randn({2, 3}).to(odd ? torch::kHalf : torch::kFloat));
      },
      {"dtype differs", "rank 1 has Half"});
}

TEST_F(DisagreementTest, AnotherRunningMean) {
  auto module = make("bn");
  if (odd) module->running_mean.fill_(1);
  expect([&] { module->forward(torch::randn({2, 3})); }, {"running_mean (hash) differs"});
}

TEST_F(DisagreementTest, AnotherGradMode) {
  auto module = make("bn");
  const torch::AutoGradMode mode(!odd);
  expect(
      [&] {
        module->forward(torch::randn({2, 3}));
      },
      {"gradient mode differs", "rank 1 has off"});
}

TEST_F(DisagreementTest, ForwardAgainstBackward) {
  auto module = make("bn");
  auto x = torch::randn({2, 3}).set_requires_grad(true);
  const auto loss = module->forward(x).sum();
  expect(
      [&] {
        if (odd) {
          loss.backward();
        } else {
          module->forward(x);
        }
      },
      {"pass differs", "rank 1 has backward"});
}

TEST_F(DisagreementTest, AnotherChannelCountSmall) {
  auto module = make("bn", odd ? 5 : 3);
  expect([&] { module->forward(torch::randn({2, odd ? 5 : 3})); }, {"of bn", "disagree"});
}

TEST_F(DisagreementTest, AnotherChannelCountLarge) {
  // Beyond the size at which blocking calls take over.
  auto module = make("bn", odd ? 9000 : 6000);
  expect(
      [&] {
        module->forward(torch::randn({2, odd ? 9000 : 6000}));
      },
      {"of bn", "channels differs", "rank 1 has 9000"});
}

TEST_F(DisagreementTest, SumsOfLayersInAnotherOrder) {
  // Small enough to be polled, and too large for that.
  for (const int64_t rows : {2, 128}) {
    comm = new_world();
    const auto make_linear = [&](const std::string& name) {
      return RowParallelLinear(RowParallelLinearOptions(8, 128).communicator(comm).name(name));
    };
    auto first = make_linear("first"), second = make_linear("second");
    expect(
        [&] {
          auto& layer = odd ? second : first;
          layer(torch::randn({rows, layer->weight.size(1)}));
        },
        {"module"});  // which one, under SYNCNORM_CHECK=full
  }
}

TEST_F(DisagreementTest, AnotherNumberOfRowsInALinearLayer) {
  for (const bool sharded : {false, true}) {
    comm = new_world();
    RowParallelLinear row(
        RowParallelLinearOptions(8, 16).scatter_output(sharded).communicator(comm).name("row"));
    expect([&] { row(torch::randn({odd ? 3 : 2, row->weight.size(1)})); }, {"of row"});
    comm = new_world();
    ColumnParallelLinear column(
        ColumnParallelLinearOptions(8, 16).input_is_sharded(true).communicator(comm).name("col"));
    const auto own = column->options.in_shard_sizes()[comm->rank()];
    expect([&] { column(torch::randn({odd ? 3 : 2, own})); }, {"of col"});
  }
}

/// A tag is 16 bits, so that one change in 65536 goes unseen; not a place in the text where all do.
TEST(Signature, TagDependsOnEveryCharacter) {
  for (size_t length = 1; length <= 40; ++length) {
    const std::string text(length, 'a');
    for (size_t at = 0; at < length; ++at) {
      int same = 0;
      for (char other = 'b'; other <= 'z'; ++other) {
        auto changed = text;
        changed[at] = other;
        same += Signature().append(changed).tag() == Signature().append(text).tag() ? 1 : 0;
      }
      EXPECT_LE(same, 1) << "character " << at << " of " << length;
    }
  }
}

TEST(Signature, NamesEveryDifferingField) {
  const auto text = describe_differences({"a=1;b=x;", "a=1;b=y;", "a=2;b=x;c=3;"});
  EXPECT_EQ(text,
            "a differs: ranks 0 1 have 1, rank 2 has 2; b differs: ranks 0 2 have x, rank 1 has y; "
            "c differs: ranks 0 1 have "
            "(none), rank 2 has 3");
  EXPECT_EQ(describe_differences({"a=1;", "a=1;"}), "");
}

}  // namespace
}  // namespace syncnorm
