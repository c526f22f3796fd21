#include "syncnorm/state_dict.h"

#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "support/world.h"
#include "syncnorm/sync_batch_norm.h"

namespace syncnorm {
namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;
using testing::message_of;
using torch::Tensor;

/// A folder for one test of one process.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    auto pattern = (fs::temp_directory_path() / "syncnorm-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  size_t entries() const {
    return static_cast<size_t>(
        std::distance(fs::directory_iterator(path_), fs::directory_iterator()));
  }

 private:
  fs::path path_;
};

/// Every dtype and layout that a checkpoint may hold. state_dict_test.py builds the same.
nn::Sequential exchange_network() {
  nn::Sequential net(
      nn::Conv2d(nn::Conv2dOptions(2, 3, 3)),
      SyncBatchNorm(SyncBatchNormOptions(3).communicator(self_communicator())),
      SyncBatchNorm(SyncBatchNormOptions(3).affine(false).communicator(self_communicator())));
  net->register_buffer("f16", torch::zeros({5}, torch::kHalf));
  net->register_buffer("bf16", torch::zeros({2, 2}, torch::kBFloat16));
  net->register_buffer("f64", torch::zeros({3}, torch::kDouble));
  net->register_buffer("flags", torch::zeros({4}, torch::kBool));
  net->register_buffer("bytes", torch::zeros({4}, torch::kByte));
  net->register_buffer("empty", torch::zeros({0, 4}));
  net->register_buffer("scalar", torch::zeros({}));
  net->register_buffer("channels_last",
                       torch::zeros({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast));
  net->register_buffer("part", torch::zeros({10}, torch::kLong).narrow(0, 3, 4));
  return net;
}

/// Fills tensor `i` with i + 0, 1, 2, ... modulo 7 over its elements in row-major order: exact in
/// every dtype.
void fill(nn::Module& module) {
  const torch::NoGradGuard no_grad;
  int64_t index = 0;
  const auto fill_one = [&](const Tensor& tensor) {
    tensor.copy_(((torch::arange(tensor.numel()) + index++) % 7).view(tensor.sizes()));
  };
  for (const auto& item : module.named_parameters()) fill_one(item.value());
  for (const auto& item : module.named_buffers()) fill_one(item.value());
}

bool same_state(const nn::Module& a, const nn::Module& b) {
  const auto equal = [](const auto& left, const auto& right) {
    for (const auto& item : left) {
      if (!torch::equal(item.value(), right[item.key()])) return false;
    }
    return left.size() == right.size();
  };
  return equal(a.named_parameters(), b.named_parameters()) &&
         equal(a.named_buffers(), b.named_buffers());
}

TEST(StateDict, RoundTripsEveryDtypeAndLayout) {
  const TemporaryFolder folder;
  const auto path = folder.file("net.pt");
  auto net = exchange_network();
  fill(*net);
  save_state_dict(*net, path);
  EXPECT_EQ(folder.entries(), 1u) << "a temporary file was left";
  auto other = exchange_network();
  const auto weight = other->parameters()[0];
  load_state_dict(*other, path);
  EXPECT_TRUE(same_state(*net, *other));
  EXPECT_TRUE(torch::equal(weight, net->parameters()[0]))
      << "loading must keep the tensors themselves";
  EXPECT_TRUE(weight.requires_grad());
  EXPECT_LT(fs::file_size(path), 20000u);
}

TEST(StateDict, SyncBatchNormAndBatchNormExchangeStates) {
  const TemporaryFolder folder;
  nn::Sequential synced(SyncBatchNorm(4));
  nn::Sequential plain(nn::BatchNorm2d(4));
  fill(*synced);
  save_state_dict(*synced, folder.file("a.pt"));
  load_state_dict(*plain, folder.file("a.pt"));
  EXPECT_TRUE(same_state(*synced, *plain));
}

TEST(StateDict, NamesEveryDifferenceAndChangesNothing) {
  const TemporaryFolder folder;
  const auto path = folder.file("net.pt");
  nn::Sequential saved(nn::Linear(3, 4), nn::Linear(4, 2));
  saved->register_buffer("extra", torch::ones({1}));
  save_state_dict(*saved, path);
  nn::Sequential other(nn::Linear(3, 4), nn::Linear(4, 5), nn::BatchNorm1d(2));
  const auto before = other->parameters()[0].clone();
  const auto message = message_of<c10::Error>([&] { load_state_dict(*other, path); });
  for (const char* part :
       {"Missing from the file: 2.weight", "Not in the module: extra",
        "1.weight ([2, 4] in the file, [5, 4] in the module)", "Nothing was changed"}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  EXPECT_TRUE(torch::equal(before, other->parameters()[0]));
}

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string read_bytes(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

TEST(StateDict, DamagedFilesAreErrorsThatNameTheFile) {
  const TemporaryFolder folder;
  nn::Sequential net(nn::Linear(3, 4));
  save_state_dict(*net, folder.file("good.pt"));
  const auto good = read_bytes(folder.file("good.pt"));
  write_file(folder.file("cut.pt"), good.substr(0, good.size() / 2));
  write_file(folder.file("text.pt"), "not a checkpoint");
  write_file(folder.file("nothing.pt"), "");
  for (const char* name : {"cut.pt", "text.pt", "nothing.pt", "absent.pt"}) {
    const auto message = message_of<c10::Error>([&] { load_state_dict(*net, folder.file(name)); });
    EXPECT_NE(message.find(folder.file(name)), std::string::npos) << message;
  }
  // A flipped bit anywhere is found by the archive's checksums or leads to a refusal, never to a
  // crash.
  for (size_t at = 0; at < good.size(); at += 97) {
    auto bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    write_file(folder.file("bad.pt"), bad);
    try {
      load_state_dict(*net, folder.file("bad.pt"));
    } catch (const c10::Error&) {
    }
  }
}

TEST(StateDict, FileAppearsWholeOrNotAtAll) {
  const TemporaryFolder folder;
  const auto path = folder.file("net.pt");
  nn::Sequential net(nn::Linear(3, 4));
  save_state_dict(*net, path);
  const auto before = read_bytes(path);
  nn::Sequential large(nn::Linear(100, 100));
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small{2000, old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  std::string message;
  try {
    save_state_dict(*large, path);
  } catch (const c10::Error& error) {
    message = error.what();
  }
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("File too large"), std::string::npos) << message;
  EXPECT_EQ(read_bytes(path), before) << "the former file was lost";
  EXPECT_EQ(folder.entries(), 1u) << "a temporary file was left";
  const auto absent =
      message_of<c10::Error>([&] { save_state_dict(*net, folder.file("no/such.pt")); });
  EXPECT_NE(absent.find("No such file"), std::string::npos) << absent;
}

/// The C++ half of state_dict_test.py, which sets the folder.
const char* exchange_folder() { return std::getenv("SYNCNORM_EXCHANGE_FOLDER"); }

TEST(StateDictExchange, WritesForPython) {
  if (exchange_folder() == nullptr) GTEST_SKIP() << "run by state_dict_test.py";
  auto net = exchange_network();
  fill(*net);
  save_state_dict(*net, std::string(exchange_folder()) + "/from_cpp.pt");
}

TEST(StateDictExchange, ReadsFromPython) {
  if (exchange_folder() == nullptr) GTEST_SKIP() << "run by state_dict_test.py";
  const std::string folder = exchange_folder();
  auto expected = exchange_network();
  fill(*expected);
  for (const char* name : {"ordered_dict", "plain_dict", "parameters"}) {
    auto net = exchange_network();
    load_state_dict(*net, folder + "/" + name + ".pt");
    EXPECT_TRUE(same_state(*net, *expected)) << name;
  }
  auto net = exchange_network();
  const std::vector<std::pair<std::string, std::string>> refused = {
      {"nested", "'model' is a dict"},
      {"number", "'epoch' is an integer"},
      {"wrapped", "DistributedDataParallel"},
      {"code", "no part of a dict of tensors"},
      {"old_format", "cannot be read"}};
  for (const auto& [name, part] : refused) {
    const auto message =
        message_of<c10::Error>([&, n = name] { load_state_dict(*net, folder + "/" + n + ".pt"); });
    EXPECT_NE(message.find(part), std::string::npos) << name << ": " << message;
  }
}

}  // namespace
}  // namespace syncnorm
