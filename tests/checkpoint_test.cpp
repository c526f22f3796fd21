// Checkpoints of split models: what any number of ranks wrote, any number of ranks reads.
#include "syncnorm/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <fstream>

#include "support/folder.h"
#include "syncnorm/linear.h"
#include "syncnorm/safetensors.h"
#include "syncnorm/state_dict.h"
#include "syncnorm/vocab_parallel.h"

namespace syncnorm {
namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;
using testing::message_of;
using testing::new_world;
using testing::SharedFolder;
using torch::Tensor;

using Comm = std::shared_ptr<Communicator>;
using Sizes = std::vector<int64_t>;

/// Rows that ranks share, shards without rows, columns, a table, replicated tensors, several
/// dtypes.
nn::Sequential make_model(const Comm& comm, bool scatter = true) {
  nn::Sequential model(
      VocabParallelEmbedding(VocabParallelEmbeddingOptions(7, 4).communicator(comm)),
      ColumnParallelLinear(ColumnParallelLinearOptions(4, 16)
                               .rows(qkv_rows(4, 2, 2, comm->size()))
                               .communicator(comm)),
      ColumnParallelLinear(ColumnParallelLinearOptions(4, 2).communicator(comm)),
      RowParallelLinear(RowParallelLinearOptions(5, 6).scatter_output(scatter).communicator(comm)),
      nn::BatchNorm1d(nn::BatchNormOptions(3)));
  model->at<ColumnParallelLinearImpl>(2).to(torch::kBFloat16);
  return model;
}

/// Sets every whole tensor to numbers of its own (exact in all dtypes), or all to zero.
void fill(const std::vector<ShardedTensor>& tensors, bool zero) {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto shape = tensors[i].sharding.whole_shape(tensors[i].tensor.sizes());
    const auto whole =
        ((torch::arange(c10::multiply_integers(shape)) + 3 * static_cast<int64_t>(i)) % 101)
            .view(shape);
    auto tensor = tensors[i].tensor;
    if (zero) {
      tensor.zero_();
    } else {
      tensor.copy_(tensors[i].sharding.shard_of(whole));
    }
  }
}

std::vector<Tensor> values_of(const std::vector<ShardedTensor>& tensors) {
  std::vector<Tensor> values;
  for (const auto& item : tensors) values.push_back(item.tensor.detach().clone());
  return values;
}

void expect_values(const std::vector<ShardedTensor>& tensors, const std::vector<Tensor>& values) {
  for (size_t i = 0; i < tensors.size(); ++i)
    EXPECT_TRUE(torch::equal(tensors[i].tensor, values[i])) << tensors[i].name;
}

/// Fills, keeps what it filled in, and sets to zero, so that loading has all to do.
std::vector<Tensor> expected_of(const std::vector<ShardedTensor>& tensors) {
  fill(tensors, false);
  auto values = values_of(tensors);
  fill(tensors, true);
  return values;
}

/// Unnamed modules are numbered as they are made, so ranks that are not in the group make one too.
nn::Sequential make_on_all_ranks(const Comm& comm) {
  return make_model(comm != nullptr ? comm : self_communicator());
}

/// The first `ranks` ranks; null on the others.
Comm first_ranks(const Comm& world, int ranks) {
  return world->split(world->rank() < ranks ? 0 : -1, world->rank());
}

TEST(Checkpoint, LoadsAtAnyNumberOfRanks) {
  const auto world = new_world();
  const SharedFolder folder(world);
  for (int writers = 1; writers <= world->size(); ++writers) {
    const auto path = folder.file("by" + std::to_string(writers));
    const auto comm = first_ranks(world, writers);
    const auto model = make_on_all_ranks(comm);
    if (comm != nullptr) {
      const auto tensors = sharded_tensors(*model);
      fill(tensors, false);
      comm->reset_counters();
      save_checkpoint(path, tensors, comm, {{"step", "17"}, {"writers", std::to_string(writers)}});
      EXPECT_EQ(comm->counters().all_reduce, 4);
      EXPECT_EQ(comm->counters().collectives(), 4);
      EXPECT_EQ(comm->counters().bytes, 4 * 3 * 8);
    }
    world->barrier();
    EXPECT_EQ(
        read_checkpoint_metadata(path),
        (std::map<std::string, std::string>{{"step", "17"}, {"writers", std::to_string(writers)}}));
    for (int readers = 1; readers <= world->size(); ++readers) {
      SCOPED_TRACE(c10::str(writers, " writers ", readers, " readers"));
      const auto comm = first_ranks(world, readers);
      const auto model = make_on_all_ranks(comm);
      if (comm == nullptr) continue;
      const auto tensors = sharded_tensors(*model);
      const auto expected = expected_of(tensors);
      comm->reset_counters();
      load_checkpoint(path, tensors, comm);
      EXPECT_EQ(comm->counters().collectives(), 1);
      expect_values(tensors, expected);
    }
  }
}

TEST(Checkpoint, LoadsTensorsThatAreCutAnotherWay) {
  const auto comm = new_world();
  const SharedFolder folder(comm);
  const auto whole = torch::arange(35, torch::kDouble).view({5, 7});
  const auto part = [&](int64_t dim) {
    const auto sharding =
        Sharding::consecutive(comm, dim, balanced_shards(whole.size(dim), comm->size()));
    return ShardedTensor{"t", sharding.shard_of(whole).clone(), sharding};
  };
  const std::vector<ShardedTensor> cuts = {part(0), part(1), {"t", whole.clone(), {}}};
  for (size_t from = 0; from < cuts.size(); ++from) {
    const auto path = folder.file(std::to_string(from));
    save_checkpoint(path, {cuts[from]}, comm);
    for (const auto& to : cuts) {
      // Another floating-point type as well: it converts.
      const ShardedTensor target = {"t", torch::zeros_like(to.tensor, torch::kFloat), to.sharding};
      load_checkpoint(path, {target}, comm);
      EXPECT_TRUE(torch::equal(target.tensor, to.tensor.to(torch::kFloat)));
    }
  }
}

TEST(Checkpoint, StoresReplicatedTensorsOnceAndShardsForPython) {
  const auto comm = new_world();
  const SharedFolder folder(comm);
  const auto path = folder.file("checkpoint");
  const auto model = make_model(comm, false);
  save_checkpoint(path + "/", sharded_tensors(*model), comm);  // a slash at the end does not matter
  EXPECT_FALSE(fs::exists(path + ".part"));
  for (int r = 0; r < comm->size(); ++r) {
    const auto own = load_safetensors(path + "/rank-0000" + std::to_string(r) + ".safetensors");
    EXPECT_EQ(own.contains("3.bias"), r == 0);
    EXPECT_EQ(own.contains("4.running_mean"), r == 0);
    EXPECT_EQ(own["0.weight"].size(0), balanced_shards(7, comm->size())[r]);
  }
}

TEST(Checkpoint, ErrorsNameTheTensorOnEveryRankAndChangeNothing) {
  const auto comm = new_world();
  const SharedFolder folder(comm);
  const auto path = folder.file("checkpoint");
  const auto model = make_model(comm);
  const auto tensors = sharded_tensors(*model);
  fill(tensors, false);
  save_checkpoint(path, tensors, comm);
  fill(tensors, true);
  const auto zeros = values_of(tensors);
  const auto message = [&](const std::vector<ShardedTensor>& wanted) {
    const auto text = message_of<c10::Error>([&] { load_checkpoint(path, wanted, comm); });
    expect_values(tensors, zeros);
    return text;
  };
  auto more = tensors;
  more.push_back({"extra", torch::zeros({2}), {}});
  EXPECT_NE(message(more).find("Missing: extra."), std::string::npos);
  auto fewer = tensors;
  fewer.erase(fewer.begin());
  EXPECT_NE(message(fewer).find("Unexpected: 0.weight."), std::string::npos);
  auto other = tensors;
  other.back() = {other.back().name, torch::zeros({3}), {}};
  EXPECT_NE(message(other).find("4.num_batches_tracked (whole [] in the checkpoint, [3]"),
            std::string::npos);
  other.back().tensor = torch::zeros({});
  EXPECT_NE(message(other).find("4.num_batches_tracked (Long in the checkpoint, Float"),
            std::string::npos);

  load_checkpoint(path, fewer, comm, /*ignore_unexpected=*/true);
  EXPECT_FALSE(tensors[0].tensor.ne(0).any().item<bool>());
  EXPECT_TRUE(tensors.back().tensor.ne(0).any().item<bool>());

  const auto nowhere = folder.file("nowhere");
  EXPECT_NE(message_of<c10::Error>([&] { load_checkpoint(nowhere, tensors, comm); }).find(nowhere),
            std::string::npos);
}

TEST(Checkpoint, OneRanksTroubleIsEveryRanksError) {
  const auto comm = new_world();
  const SharedFolder folder(comm);
  const auto path = folder.file("checkpoint");
  const auto model = make_model(comm);
  auto tensors = sharded_tensors(*model);
  fill(tensors, false);
  save_checkpoint(path, tensors, comm, {{"step", "1"}});
  const auto expected = values_of(tensors);
  const int last = comm->size() - 1;

  // The last rank's disk is full.
  rlimit before = {};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small = {comm->rank() == last ? 64 : before.rlim_cur, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  auto text = message_of<c10::Error>([&] {
    save_checkpoint(path, tensors, comm, {{"step", "2"}});
  });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(text.find("cannot write"), std::string::npos) << text;
  EXPECT_TRUE(comm->size() == 1 ||
              text.find("rank " + std::to_string(last) + ": ") != std::string::npos)
      << text;
  comm->barrier();
  EXPECT_FALSE(fs::exists(path + ".part"));
  EXPECT_EQ(read_checkpoint_metadata(path).at("step"), "1");
  fill(tensors, true);
  load_checkpoint(path, tensors, comm);
  expect_values(tensors, expected);

  // The ranks disagree about what there is.
  if (comm->size() > 1) {
    auto uneven = tensors;
    if (comm->rank() == last) uneven.pop_back();
    text = message_of<c10::Error>([&] { save_checkpoint(path, uneven, comm); });
    EXPECT_NE(text.find("the ranks give different names"), std::string::npos) << text;
  }

  // A file is damaged: only the ranks that need it notice.
  comm->barrier();
  if (comm->rank() == 0)
    fs::resize_file(path + "/rank-0000" + std::to_string(last) + ".safetensors", 4);
  comm->barrier();
  fill(tensors, true);
  text = message_of<c10::Error>([&] { load_checkpoint(path, tensors, comm); });
  EXPECT_NE(text.find("only 4 bytes"), std::string::npos) << text;
  for (const auto& item : tensors) {
    EXPECT_FALSE(item.tensor.ne(0).any().item<bool>()) << item.name;
  }
}

TEST(Checkpoint, ReplacesOnlyCheckpointsAndSurvivesCrashes) {
  const auto comm = new_world();
  const SharedFolder folder(comm);
  const auto path = folder.file("checkpoint");
  const std::vector<ShardedTensor> tensors = {{"t", torch::ones({2}), {}}};
  save_checkpoint(path, tensors, comm, {{"step", "1"}});
  save_checkpoint(path, tensors, comm, {{"step", "2"}});
  EXPECT_EQ(read_checkpoint_metadata(path).at("step"), "2");

  // What a crash before the last step leaves: half a new checkpoint beside.
  comm->barrier();
  if (comm->rank() == 0) {
    fs::create_directory(path + ".part");
    std::ofstream(path + ".part/rank-00003.safetensors.part77") << "half";
  }
  comm->barrier();
  EXPECT_EQ(read_checkpoint_metadata(path).at("step"), "2");
  save_checkpoint(path, tensors, comm, {{"step", "3"}});
  EXPECT_EQ(read_checkpoint_metadata(path).at("step"), "3");

  // And, where folders cannot be exchanged, between the two renames.
  comm->barrier();
  if (comm->rank() == 0) fs::rename(path, path + ".replaced");
  comm->barrier();
  EXPECT_EQ(read_checkpoint_metadata(path).at("step"), "3");
  comm->barrier();
  save_checkpoint(path, tensors, comm, {{"step", "4"}});
  EXPECT_EQ(read_checkpoint_metadata(path).at("step"), "4");
  EXPECT_FALSE(fs::exists(path + ".replaced"));

  comm->barrier();
  if (comm->rank() == 0) std::ofstream(path + "/thesis.tex") << "years of work";
  comm->barrier();
  const auto text = message_of<c10::Error>([&] { save_checkpoint(path, tensors, comm); });
  EXPECT_NE(text.find("thesis.tex"), std::string::npos) << text;
  EXPECT_TRUE(fs::exists(path + "/thesis.tex"));
  const auto reserved = message_of<c10::Error>([&] {
    save_checkpoint(path, tensors, comm, {{"syncnorm.checkpoint", ""}});
  });
  EXPECT_NE(reserved.find("reserved"), std::string::npos) << reserved;
}

TEST(Checkpoint, CarriesOptimizerState) {
  const auto comm = new_world();
  const SharedFolder folder(comm);
  const auto model = make_model(comm);
  auto tensors = sharded_tensors(*model);
  for (const auto& item : sharded_tensors(*model, /*buffers=*/false))
    tensors.push_back({"optimizer.exp_avg." + item.name,
                       torch::empty(item.tensor.sizes(), torch::kFloat), item.sharding});
  tensors.push_back({"optimizer.step", torch::tensor(0, torch::kLong), {}});
  const auto path = folder.file("checkpoint");
  fill(tensors, false);
  save_checkpoint(path, tensors, comm);
  const auto expected = expected_of(tensors);
  load_checkpoint(path, tensors, comm);
  expect_values(tensors, expected);
}

TEST(WholeState, GathersAndLoadsAtAnyNumberOfRanks) {
  const auto comm = new_world();
  const SharedFolder folder(comm);
  auto model = make_model(comm);
  const auto tensors = sharded_tensors(*model);
  fill(tensors, false);
  const auto single = make_model(self_communicator());
  const auto single_tensors = sharded_tensors(*single);
  fill(single_tensors, false);

  comm->reset_counters();
  const auto first = gather_state_dict(*model, comm);
  EXPECT_EQ(comm->counters().collectives(), comm->counters().all_gather);
  EXPECT_EQ(comm->counters().all_gather, 7);  // all but the batch norm's
  EXPECT_EQ(first.size(), comm->rank() == 0 ? tensors.size() : 0);
  const auto state = gather_state_dict(*model, comm, /*everywhere=*/true);
  ASSERT_EQ(state.size(), single_tensors.size());
  for (const auto& item : single_tensors)
    EXPECT_TRUE(torch::equal(state[item.name], item.tensor)) << item.name;

  // Through the formats that Python reads, and back into shards.
  if (comm->rank() == 0) {
    save_safetensors(folder.file("model.safetensors"), first);
    save_state_dict(first, folder.file("model.pt"));
  }
  comm->barrier();
  const auto expected = expected_of(tensors);
  load_whole_state_dict(*model, load_safetensors(folder.file("model.safetensors")));
  expect_values(tensors, expected);
  fill(tensors, true);
  load_whole_state_dict(*model, read_state_dict(folder.file("model.pt")));
  expect_values(tensors, expected);
}

TEST(WholeState, ErrorsNameTheTensorsAndChangeNothing) {
  const auto comm = new_world();
  auto model = make_model(comm);
  const auto tensors = sharded_tensors(*model);
  fill(tensors, false);
  const auto before = values_of(tensors);
  auto state = gather_state_dict(*model, comm, true);
  for (auto& item : state) item.value() = torch::zeros_like(item.value());
  state["3.weight"] = torch::zeros({6, 4});
  state.erase("0.weight");
  state.insert("head.weight", torch::zeros({1}));
  const auto text = message_of<c10::Error>([&] { load_whole_state_dict(*model, state); });
  EXPECT_NE(text.find("Missing: 0.weight."), std::string::npos) << text;
  EXPECT_NE(text.find("Unexpected: head.weight."), std::string::npos) << text;
  EXPECT_NE(text.find("3.weight ([6, 4] given, [6, 5] whole in the module)"), std::string::npos)
      << text;
  expect_values(tensors, before);
}

}  // namespace
}  // namespace syncnorm
