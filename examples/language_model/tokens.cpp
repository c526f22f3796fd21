#include "tokens.h"

#include <cmath>
#include <cstring>

#include "common/console.h"
#include "common/failure.h"
#include "corpus.h"

namespace language_model {
namespace {

torch::Tensor to_tensor(const std::vector<int32_t>& values) {
  return torch::tensor(values, torch::kInt32);
}

/// `tensor` of rank 0, whose number of elements the others do not know.
torch::Tensor broadcast_tokens(syncnorm::Communicator& comm, torch::Tensor tensor) {
  auto length = torch::tensor({tensor.defined() ? tensor.numel() : int64_t{0}});
  comm.broadcast(length, 0);
  if (comm.rank() != 0) tensor = torch::empty({length.item<int64_t>()}, torch::kInt32);
  comm.broadcast(tensor, 0);
  return tensor;
}

/// FNV-1a over all tokens.
std::string checksum_of(const Tokens& tokens) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const auto& part : {tokens.training, tokens.held_out}) {
    const auto* values = part.const_data_ptr<int32_t>();
    for (int64_t i = 0; i < part.numel(); ++i) {
      hash = (hash ^ static_cast<uint32_t>(values[i])) * 0x100000001b3;
    }
    hash = (hash ^ static_cast<uint64_t>(part.numel())) * 0x100000001b3;
  }
  return job::format("%016lx", hash);
}

/// With one added to every count, so that a token missing in training costs something finite.
double unigram_entropy(const Tokens& tokens) {
  const auto counts = torch::bincount(tokens.training, {}, tokens.tokenizer.size()) + 1;
  const auto costs = -torch::log(counts.to(torch::kDouble) / counts.sum());
  const auto text = tokens.held_out.to(torch::kLong);
  return (costs.index_select(0, text).sum() / tokens.bytes.index_select(0, text).sum())
      .item<double>();
}

/// A hash of three numbers whose every bit depends on all of theirs (the finalizer of SplitMix64
/// after each).
uint64_t mix(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t state = 0;
  for (const auto value : {a, b, c}) {
    state += value + 0x9e3779b97f4a7c15;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9;
    state = (state ^ (state >> 27)) * 0x94d049bb133111eb;
    state ^= state >> 31;
  }
  return state;
}

Windows cut(const torch::Tensor& tokens, const std::vector<int64_t>& offsets, int64_t context) {
  auto all = torch::empty({static_cast<int64_t>(offsets.size()), context + 1}, torch::kInt32);
  for (size_t w = 0; w < offsets.size(); ++w) {
    all[static_cast<int64_t>(w)].copy_(tokens.narrow(0, offsets[w], context + 1));
  }
  all = all.to(torch::kLong);
  return {all.narrow(1, 0, context), all.narrow(1, 1, context)};
}

void check_length(const torch::Tensor& tokens, int64_t context, const std::string& what) {
  if (tokens.numel() > context) return;
  throw std::runtime_error("the " + what + " text has " + std::to_string(tokens.numel()) +
                           " tokens, which do not fill one window of --context " +
                           std::to_string(context) + " and its next token: give more, or lower it");
}

}  // namespace

Tokens load_tokens(const Recipe& recipe, const std::optional<Tokenizer>& given,
                   syncnorm::Communicator& comm) {
  Tokens tokens;
  job::agree(comm, [&] {
    if (comm.rank() != 0) return;
    const auto corpus = read_corpus(recipe);
    if (given)
      tokens.tokenizer = *given;
    else if (recipe.tokenizer == "bpe")
      tokens.tokenizer = Tokenizer::train(corpus.training, recipe.vocab);
    tokens.training = to_tensor(tokens.tokenizer.encode(corpus.training));
    tokens.held_out = to_tensor(tokens.tokenizer.encode(corpus.held_out));
    check_length(tokens.training, recipe.context, "training");
    check_length(tokens.held_out, recipe.context, "held-out");
    tokens.description =
        corpus.description + job::format("; %ld kinds of token, %.2f bytes each in held-out text",
                                         tokens.tokenizer.size(),
                                         static_cast<double>(corpus.held_out.size()) /
                                             static_cast<double>(tokens.held_out.numel()));
  });
  tokens.tokenizer = Tokenizer::from_json(job::broadcast_text(comm, tokens.tokenizer.to_json()));
  tokens.training = broadcast_tokens(comm, tokens.training);
  tokens.held_out = broadcast_tokens(comm, tokens.held_out);

  std::vector<int64_t> lengths;
  for (int64_t t = 0; t < tokens.tokenizer.size(); ++t)
    lengths.push_back(static_cast<int64_t>(tokens.tokenizer.bytes(t).size()));
  tokens.bytes = torch::tensor(lengths);
  tokens.checksum = checksum_of(tokens);
  tokens.unigram = unigram_entropy(tokens);
  return tokens;
}

Windows training_windows(const Tokens& tokens, const Recipe& recipe, int64_t step, int64_t first,
                         int64_t count) {
  const auto starts = static_cast<uint64_t>(tokens.training.numel() - recipe.context);
  std::vector<int64_t> offsets;
  for (int64_t index = first; index < first + count; ++index) {
    const auto hash = mix(recipe.seed, static_cast<uint64_t>(step), static_cast<uint64_t>(index));
    offsets.push_back(static_cast<int64_t>(hash % starts));
  }
  return cut(tokens.training, offsets, recipe.context);
}

Windows held_out_windows(const Tokens& tokens, int64_t context, int64_t all, int64_t first,
                         int64_t count) {
  const auto last = tokens.held_out.numel() - context - 1;
  std::vector<int64_t> offsets;
  for (int64_t index = first; index < first + count; ++index)
    offsets.push_back(all > 1 ? index * last / (all - 1) : 0);
  return cut(tokens.held_out, offsets, context);
}

int64_t separate_windows(const Tokens& tokens, int64_t context) {
  return std::max<int64_t>(1, (tokens.held_out.numel() - 1) / context);
}

}  // namespace language_model
