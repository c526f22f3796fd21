#include "tokenizer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <queue>
#include <stdexcept>

namespace language_model {
namespace {

enum class Kind { letter, digit, space, other };

Kind kind_of(char character) {
  const auto byte = static_cast<unsigned char>(character);
  if (byte >= 0x80 || byte == '\'' || (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z'))
    return Kind::letter;
  if (byte >= '0' && byte <= '9') return Kind::digit;
  return byte == ' ' || (byte >= '\t' && byte <= '\r') ? Kind::space : Kind::other;
}

/// Calls `each(word)` for the words of `text` in order; joined they are `text`. A length limit
/// keeps the encoding of a long run of one kind from taking quadratic time.
template <typename F>
void for_each_word(std::string_view text, F each) {
  constexpr size_t kLongest = 48;
  for (size_t begin = 0; begin < text.size();) {
    auto end = begin;
    if (text[begin] == ' ' && begin + 1 < text.size() && kind_of(text[begin + 1]) != Kind::space)
      ++end;
    const auto kind = kind_of(text[end]);
    while (end < text.size() && end - begin < kLongest && kind_of(text[end]) == kind) ++end;
    each(text.substr(begin, end - begin));
    begin = end;
  }
}

uint64_t key_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
}

std::vector<int32_t> bytes_of(std::string_view word) {
  std::vector<int32_t> tokens;
  for (const char c : word) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

/// Replaces every (left, right) in `tokens`, from the left, by `joined`. False: there is none.
bool join(std::vector<int32_t>& tokens, int32_t left, int32_t right, int32_t joined) {
  size_t kept = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const bool match = i + 1 < tokens.size() && tokens[i] == left && tokens[i + 1] == right;
    tokens[kept++] = match ? joined : tokens[i];
    if (match) ++i;
  }
  const bool changed = kept < tokens.size();
  tokens.resize(kept);
  return changed;
}

/// Counts of neighbouring tokens over all words, kept up to date from merge to merge.
class PairCounts {
 public:
  explicit PairCounts(std::string_view text) {
    std::unordered_map<std::string_view, int64_t> counts;
    for_each_word(text, [&](std::string_view word) { ++counts[word]; });
    for (const auto& [word, count] : counts) words_.push_back({bytes_of(word), count});
    for (size_t w = 0; w < words_.size(); ++w) add(w, +1);
    for (const auto& [pair, count] : counts_) queue_.push({count, ~pair});
  }

  /// The pair that comes most often, with how often; 0 times where there is none.
  std::pair<uint64_t, int64_t> most_frequent() {
    while (!queue_.empty()) {
      const auto [count, inverted] = queue_.top();
      if (counts_[~inverted] == count) return {~inverted, count};
      queue_.pop();  // an entry from before a merge changed the count
    }
    return {0, 0};
  }

  void merge(int32_t left, int32_t right, int32_t joined) {
    auto where = std::move(words_with_[key_of(left, right)]);
    std::sort(where.begin(), where.end());
    where.erase(std::unique(where.begin(), where.end()), where.end());
    changed_.clear();
    for (const auto w : where) {
      add(w, -1);
      join(words_[w].tokens, left, right, joined);
      add(w, +1);
    }
    std::sort(changed_.begin(), changed_.end());
    changed_.erase(std::unique(changed_.begin(), changed_.end()), changed_.end());
    for (const auto pair : changed_) queue_.push({counts_[pair], ~pair});
  }

 private:
  struct Word {
    std::vector<int32_t> tokens;
    int64_t count;
  };

  void add(size_t w, int64_t sign) {
    const auto& [tokens, count] = words_[w];
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      const auto pair = key_of(tokens[i], tokens[i + 1]);
      counts_[pair] += sign * count;
      changed_.push_back(pair);
      if (sign > 0) words_with_[pair].push_back(w);
    }
  }

  std::vector<Word> words_;
  std::unordered_map<uint64_t, int64_t> counts_;
  std::unordered_map<uint64_t, std::vector<size_t>> words_with_;  ///< may name some that no more do
  std::vector<uint64_t> changed_;
  /// Largest count first, then smallest pair.
  std::priority_queue<std::pair<int64_t, uint64_t>> queue_;
};

}  // namespace

Tokenizer::Tokenizer(std::vector<Merge> merges) : merges_(std::move(merges)) {
  for (int byte = 0; byte < 256; ++byte) tokens_.emplace_back(1, static_cast<char>(byte));
  for (const auto& [left, right] : merges_) {
    merged_.emplace(key_of(left, right), static_cast<int32_t>(tokens_.size()));
    tokens_.push_back(tokens_.at(left) + tokens_.at(right));
  }
}

Tokenizer Tokenizer::train(std::string_view text, int64_t size) {
  PairCounts counts(text);
  std::vector<Merge> merges;
  while (static_cast<int64_t>(merges.size()) + 256 < size) {
    const auto [pair, count] = counts.most_frequent();
    if (count < 2) break;
    const auto left = static_cast<int32_t>(pair >> 32);
    const auto right = static_cast<int32_t>(pair & 0xffffffff);
    counts.merge(left, right, static_cast<int32_t>(256 + merges.size()));
    merges.emplace_back(left, right);
  }
  return Tokenizer(std::move(merges));
}

Tokenizer Tokenizer::from_json(const std::string& text) {
  try {
    std::vector<Merge> merges;
    for (const auto& tokens :
         nlohmann::json::parse(text).at("merges").get<std::vector<std::vector<int32_t>>>()) {
      if (tokens.size() != 2) throw std::length_error("a merge is of two tokens");
      merges.emplace_back(tokens[0], tokens[1]);
    }
    return Tokenizer(std::move(merges));
  } catch (const std::exception&) {
    throw std::runtime_error("not a tokenizer of this program: " + text.substr(0, 60));
  }
}

std::string Tokenizer::to_json() const { return nlohmann::json{{"merges", merges_}}.dump(); }

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> tokens;
  std::unordered_map<std::string_view, std::vector<int32_t>> known;
  for_each_word(text, [&](std::string_view word) {
    auto found = known.find(word);
    if (found == known.end()) found = known.emplace(word, encode_word(word)).first;
    tokens.insert(tokens.end(), found->second.begin(), found->second.end());
  });
  return tokens;
}

std::vector<int32_t> Tokenizer::encode_word(std::string_view word) const {
  auto tokens = bytes_of(word);
  while (true) {
    auto first = static_cast<int32_t>(tokens_.size());  // merges are done in the order of training
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      const auto found = merged_.find(key_of(tokens[i], tokens[i + 1]));
      if (found != merged_.end()) first = std::min(first, found->second);
    }
    if (first == static_cast<int32_t>(tokens_.size())) return tokens;
    const auto& [left, right] = merges_[first - 256];
    join(tokens, left, right, first);
  }
}

std::string Tokenizer::decode(const std::vector<int32_t>& tokens) const {
  std::string text;
  for (const auto token : tokens) text += bytes(token);
  return text;
}

}  // namespace language_model
