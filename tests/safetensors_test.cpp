// Files in the safetensors format: what is written is read, and what is not as it should be is
// refused.
#include "syncnorm/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdlib>
#include <fstream>

#include "support/folder.h"

namespace syncnorm {
namespace {

namespace fs = std::filesystem;
using testing::message_of;
using testing::TemporaryFolder;
using torch::Tensor;
using Tensors = torch::OrderedDict<std::string, Tensor>;

/// 0, 1, 2, ... modulo 7 (bool: modulo 2): exact in every dtype. safetensors_test.py makes the
/// same.
Tensor counted(const std::vector<int64_t>& shape, torch::ScalarType dtype) {
  const auto numbers =
      torch::arange(c10::multiply_integers(shape)) % (dtype == torch::kBool ? 2 : 7);
  return numbers.to(dtype).view(shape);
}

/// Every dtype, no, one and several dimensions, no elements, any strides.
Tensors every_kind() {
  Tensors tensors;
  tensors.insert("bool", counted({5}, torch::kBool));
  tensors.insert("f64", counted({2, 3}, torch::kDouble));
  tensors.insert("f32", counted({3, 2, 2}, torch::kFloat));
  tensors.insert("f16", counted({3}, torch::kHalf));
  tensors.insert("bf16", counted({2, 2}, torch::kBFloat16));
  tensors.insert("i64", counted({}, torch::kLong));
  tensors.insert("i32", counted({4}, torch::kInt));
  tensors.insert("i16", counted({3}, torch::kShort));
  tensors.insert("i8", counted({3}, torch::kChar));
  tensors.insert("u8", counted({7}, torch::kByte));
  tensors.insert("empty", counted({0, 4}, torch::kFloat));
  tensors.insert("strided", counted({3, 4}, torch::kFloat).t().narrow(0, 1, 2));
  tensors.insert("a \"name\" \n\\ \xc3\xa9", counted({2}, torch::kFloat));
  return tensors;
}

void expect_equal(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.keys(), b.keys());
  for (const auto& item : a) {
    EXPECT_EQ(item.value().scalar_type(), b[item.key()].scalar_type()) << item.key();
    EXPECT_TRUE(torch::equal(item.value(), b[item.key()])) << item.key();
  }
}

TEST(Safetensors, ReadsWhatItWrote) {
  const TemporaryFolder folder;
  const auto path = folder.file("all.safetensors");
  const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"epoch", "3"}};
  save_safetensors(path, every_kind(), metadata);
  expect_equal(load_safetensors(path), every_kind());
  EXPECT_EQ(read_safetensors_metadata(path), metadata);
  save_safetensors(path, Tensors());
  EXPECT_TRUE(load_safetensors(path).is_empty());
  EXPECT_TRUE(read_safetensors_metadata(path).empty());
}

TEST(Safetensors, RefusesWhatItCannotWrite) {
  const TemporaryFolder folder;
  const auto path = folder.file("bad.safetensors");
  const auto save_one = [&](const std::string& name, const Tensor& tensor) {
    Tensors tensors;
    tensors.insert(name, tensor);
    return message_of<c10::Error>([&] { save_safetensors(path, tensors); });
  };
  EXPECT_NE(save_one("z", torch::zeros({2}, torch::kComplexFloat)).find("'z' has the dtype"),
            std::string::npos);
  EXPECT_NE(save_one("u", Tensor()).find("'u' is not a dense tensor"), std::string::npos);
  EXPECT_NE(save_one("__metadata__", torch::zeros({2})).find("__metadata__"), std::string::npos);
  EXPECT_NE(save_one("\xff", torch::zeros({2})).find("UTF-8"), std::string::npos);
  EXPECT_FALSE(fs::exists(path));
  const auto nowhere = folder.file("no/such/folder");
  EXPECT_NE(message_of<c10::Error>([&] { save_safetensors(nowhere, Tensors()); }).find(nowhere),
            std::string::npos);
}

TEST(Safetensors, KeepsTheOldFileWhenTheDiskIsFull) {
  const TemporaryFolder folder;
  const auto path = folder.file("model.safetensors");
  save_safetensors(path, every_kind());
  Tensors large;
  large.insert("large", torch::ones({100000}));
  rlimit before = {};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small = {65536, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  const auto text = message_of<c10::Error>([&] { save_safetensors(path, large); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(text.find("cannot write"), std::string::npos) << text;
  expect_equal(load_safetensors(path), every_kind());
}

struct Bad {
  std::string header;
  size_t data;  // bytes behind it
  const char* says;
};

TEST(Safetensors, RefusesFilesThatAreNotAsTheFormatDemands) {
  const TemporaryFolder folder;
  const auto path = folder.file("bad.safetensors");
  const auto f32 = [](const std::string& name, const std::string& shape,
                      const std::string& offsets) {
    return "\"" + name + R"(":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" + offsets +
           "}";
  };
  constexpr size_t kDeep = 1'000'000;  // recursion over it would leave the stack
  const std::vector<Bad> cases = {
      {"{\"a\":" + std::string(kDeep, '[') + std::string(kDeep, ']') + "}", 0, "nested"},
      {"", 0, "not a JSON object"},
      {"[]", 0, "not a JSON object"},
      {"{", 0, "parse error"},
      {"{\"a\":3}", 0, "needs dtype"},
      {"{" + f32("a", "[1]", "[0,4]") + "," + f32("a", "[1]", "[0,4]") + "}", 4, "appears twice"},
      {"{" + f32("a", "[1]", "[0,4]") + "," + f32("b", "[1]", "[2,6]") + "}", 6, "overlap"},
      {"{" + f32("a", "[1]", "[0,4]") + "," + f32("b", "[1]", "[8,12]") + "}", 12, "hole"},
      {"{" + f32("a", "[1]", "[0,4]") + "}", 5, "5 bytes of data"},
      {"{" + f32("a", "[2]", "[0,8]") + "}", 4, "4 bytes of data"},
      {"{" + f32("a", "[2]", "[0,4]") + "}", 4, "for shape [2]"},
      {"{" + f32("a", "[1]", "[4,0]") + "}", 0, "data_offsets"},
      {"{" + f32("a", "[1]", "[0]") + "}", 4, "data_offsets"},
      {"{" + f32("a", "[-1]", "[0,4]") + "}", 4, "whole number"},
      {"{" + f32("a", "[1.5]", "[0,4]") + "}", 4, "whole number"},
      {"{" + f32("a", "[18446744073709551615]", "[0,4]") + "}", 4, "whole number"},
      {"{" + f32("a", "[4611686018427387904,4]", "[0,0]") + "}", 0, "more bytes than can be"},
      {"{" + f32("a", "[0,4611686018427387904,4]", "[0,4]") + "}", 4, "for shape"},
      {"{" + f32("a", "3", "[0,4]") + "}", 4, "has the shape 3"},
      {R"({"a":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}})", 1, "F8_E4M3"},
      {R"({"a":{"dtype":3,"shape":[1],"data_offsets":[0,1]}})", 1, "not supported"},
      {R"({"__metadata__":{"a":3}})", 0, "not a string"},
      {R"({"__metadata__":3})", 0, "not an object"},
      {R"({"a":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}})", 1, "neither 0 nor 1"},
  };
  for (const auto& bad : cases) {
    const uint64_t length = bad.header.size();
    std::ofstream(path, std::ios::binary)
            .write(reinterpret_cast<const char*>(&length), sizeof length)
            .write(bad.header.data(), static_cast<std::streamsize>(length))
        << std::string(bad.data, '\2');
    const auto text = message_of<c10::Error>([&] { load_safetensors(path); });
    EXPECT_NE(text.find(bad.says), std::string::npos) << bad.header.substr(0, 200) << "\n" << text;
    EXPECT_NE(text.find(path), std::string::npos) << text;
  }
  for (const uint64_t length : {uint64_t{3}, uint64_t{200'000'000}, ~uint64_t{0}}) {
    std::ofstream(path, std::ios::binary)
            .write(reinterpret_cast<const char*>(&length), sizeof length)
        << "{}";
    const auto text = message_of<c10::Error>([&] { load_safetensors(path); });
    EXPECT_NE(text.find("its header should have"), std::string::npos) << text;
  }
  std::ofstream(path, std::ios::binary) << "short";
  EXPECT_NE(message_of<c10::Error>([&] { load_safetensors(path); }).find("only 5 bytes"),
            std::string::npos);
  EXPECT_NE(message_of<c10::Error>([&] { load_safetensors(folder.file("")); }).find("regular file"),
            std::string::npos);
  EXPECT_NE(message_of<c10::Error>([&] { load_safetensors(folder.file("none")); }).find("No such"),
            std::string::npos);
}

// safetensors_test.py runs these two with a folder that it shares.
TEST(SafetensorsExchange, WritesForPython) {
  const char* folder = std::getenv("SYNCNORM_EXCHANGE_FOLDER");
  if (folder == nullptr) GTEST_SKIP() << "run by safetensors_test.py";
  save_safetensors(std::string(folder) + "/from_cpp.safetensors", every_kind(), {{"format", "pt"}});
}

TEST(SafetensorsExchange, ReadsFromPython) {
  const char* folder = std::getenv("SYNCNORM_EXCHANGE_FOLDER");
  if (folder == nullptr) GTEST_SKIP() << "run by safetensors_test.py";
  const auto path = std::string(folder) + "/from_python.safetensors";
  const auto state = load_safetensors(path);
  const auto expected = every_kind();
  ASSERT_EQ(state.size(), expected.size());
  for (const auto& item : expected) {
    EXPECT_EQ(state[item.key()].scalar_type(), item.value().scalar_type()) << item.key();
    EXPECT_TRUE(torch::equal(state[item.key()], item.value())) << item.key();
  }
  EXPECT_EQ(read_safetensors_metadata(path).at("by"), "python");
}

}  // namespace
}  // namespace syncnorm
