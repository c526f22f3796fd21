#pragma once

#include <torch/torch.h>

#include <optional>
#include <string>

#include "options.h"
#include "syncnorm/communicator.h"
#include "tokenizer.h"

namespace language_model {

/// The corpus in tokens, the same on every rank.
struct Tokens {
  Tokenizer tokenizer;
  torch::Tensor training, held_out;  ///< int32 [number of tokens]
  torch::Tensor bytes;               ///< int64 [tokenizer.size()], length of each token
  double unigram = 0;  ///< nats a byte of held-out text, coded by the training text's token counts
  std::string checksum;     ///< tells whether a checkpoint saw the same tokens
  std::string description;  ///< what was read, how it was split and coded, for people
};

/// Rank 0 reads the corpus and trains a tokenizer on its training part, unless it is `given`; the
/// others receive what it has. Raises job::Failure on all ranks. Collective.
Tokens load_tokens(const Recipe& recipe, const std::optional<Tokenizer>& given,
                   syncnorm::Communicator& comm);

/// Some windows of text: inputs and, shifted by one, targets, both int64 [windows, context].
struct Windows {
  torch::Tensor inputs, targets;
};

/// The windows [first, first + count) of the training step `step`'s `recipe.batch`. They depend on
/// (seed, step, place in the batch) alone, so that however many ranks share a batch it is the same.
Windows training_windows(const Tokens& tokens, const Recipe& recipe, int64_t step, int64_t first,
                         int64_t count);

/// The windows [first, first + count) of `all` evenly spread over the held-out text; they do not
/// overlap where `all` is at most separate_windows.
Windows held_out_windows(const Tokens& tokens, int64_t context, int64_t all, int64_t first,
                         int64_t count);

/// How many windows the held-out text fills.
int64_t separate_windows(const Tokens& tokens, int64_t context);

}  // namespace language_model
