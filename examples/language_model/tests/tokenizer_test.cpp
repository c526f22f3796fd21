#include "tokenizer.h"

#include <gtest/gtest.h>

#include <random>

namespace language_model {
namespace {

std::string random_bytes(size_t count, unsigned seed) {
  std::mt19937 draw(seed);
  std::string text;
  for (size_t i = 0; i < count; ++i) text += static_cast<char>(draw() & 0xff);
  return text;
}

std::string repeated(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

const std::string kVerse = "To be, or not to be: that is the question. ";

TEST(Tokenizer, WithoutMergesIsTheBytes) {
  const Tokenizer tokenizer;
  EXPECT_EQ(tokenizer.size(), 256);
  EXPECT_EQ(tokenizer.encode(std::string("a\0\xff", 3)), (std::vector<int32_t>{'a', 0, 255}));
}

TEST(Tokenizer, GivesBackAnyBytes) {
  const auto noise = random_bytes(20000, 1);
  const std::vector<Tokenizer> tokenizers = {
      Tokenizer(), Tokenizer::train(repeated(kVerse, 20), 300), Tokenizer::train(noise, 400)};
  const std::vector<std::string> texts = {"",
                                          " ",
                                          "\n\n  \t",
                                          noise,
                                          random_bytes(999, 2),
                                          kVerse,
                                          "caf\xc3\xa9 \xe2\x80\x94 \xf0\x9f\x8e\xad",
                                          repeated("a", 1000),
                                          repeated(" ", 1000),
                                          repeated("'tis ", 300)};
  for (const auto& tokenizer : tokenizers) {
    for (const auto& text : texts) EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  }
}

// Merges worked out by hand: "ab" comes 4 times, then "abc" 3 times against twice or once for
// others.
TEST(Tokenizer, MergesTheMostFrequentPairFirst) {
  const auto tokenizer = Tokenizer::train("abc abc\nabc ab", 258);
  ASSERT_EQ(tokenizer.size(), 258);
  EXPECT_EQ(tokenizer.bytes(256), "ab");
  EXPECT_EQ(tokenizer.bytes(257), "abc");
  EXPECT_EQ(tokenizer.encode("abcab"), (std::vector<int32_t>{257, 256}));
}

TEST(Tokenizer, AmongEqualsTakesTheSmallerPair) {
  EXPECT_EQ(Tokenizer::train("xy\nab\nxy\nab", 257).bytes(256), "ab");
}

TEST(Tokenizer, MergesNothingOverWords) {
  const auto tokenizer = Tokenizer::train(repeated("be be ", 50), 400);
  for (int64_t token = 256; token < tokenizer.size(); ++token) {
    EXPECT_EQ(tokenizer.bytes(token).find(' ', 1), std::string::npos) << tokenizer.bytes(token);
  }
}

TEST(Tokenizer, StopsWhereNoPairComesTwice) {
  EXPECT_EQ(Tokenizer::train("abcdef", 300).size(), 256);
  EXPECT_EQ(Tokenizer::train("", 300).size(), 256);
}

TEST(Tokenizer, TrainingTextGetsShorter) {
  const auto text = repeated(kVerse, 20);
  EXPECT_LT(Tokenizer::train(text, 300).encode(text).size(), text.size() / 2);
}

TEST(Tokenizer, SurvivesJson) {
  const auto tokenizer = Tokenizer::train(random_bytes(20000, 3), 300);
  const auto again = Tokenizer::from_json(tokenizer.to_json());
  const auto text = random_bytes(500, 4);
  EXPECT_EQ(again.size(), 300);
  EXPECT_EQ(again.encode(text), tokenizer.encode(text));
}

TEST(Tokenizer, RefusesWhatIsNoTokenizer) {
  for (const auto* text : {"", "{}", "{\"merges\":[[1,2,3]]}", "{\"merges\":[[300,1]]}", "[1"}) {
    EXPECT_THROW(Tokenizer::from_json(text), std::runtime_error) << text;
  }
}

}  // namespace
}  // namespace language_model
