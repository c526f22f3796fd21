#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace language_model {

/// Byte-pair encoding (Sennrich et al., 2016) over bytes: token k < 256 is the byte k, token 256 +
/// k joins the two tokens of the k-th merge. Without merges it is the byte-level tokenizer. Any
/// bytes at all can be encoded, and decoding gives them back.
///
/// Merges do not reach over the borders of words: a run of letters and apostrophes, of digits, of
/// white space or of other characters, each but white space with the one space before it.
class Tokenizer {
 public:
  Tokenizer() : Tokenizer(std::vector<std::pair<int32_t, int32_t>>()) {}

  /// Merges, one after the other, the pair of neighbours that `text` has most often, the one of
  /// smaller tokens among equals, until there are `size` tokens or no pair comes twice.
  static Tokenizer train(std::string_view text, int64_t size);

  /// What to_json wrote; raises std::runtime_error for anything else.
  static Tokenizer from_json(const std::string& text);
  std::string to_json() const;

  /// Number of tokens.
  int64_t size() const { return static_cast<int64_t>(tokens_.size()); }
  /// The bytes of a token. Raises std::out_of_range where there is no such token.
  const std::string& bytes(int64_t token) const { return tokens_.at(token); }

  std::vector<int32_t> encode(std::string_view text) const;
  std::string decode(const std::vector<int32_t>& tokens) const;

 private:
  using Merge = std::pair<int32_t, int32_t>;
  explicit Tokenizer(std::vector<Merge> merges);
  std::vector<int32_t> encode_word(std::string_view word) const;

  std::vector<Merge> merges_;
  std::unordered_map<uint64_t, int32_t> merged_;  ///< by pair, the token that joins it
  std::vector<std::string> tokens_;
};

}  // namespace language_model
