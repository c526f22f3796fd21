#pragma once

#include <string>

#include "options.h"

namespace language_model {

/// Text to learn from, and text held out for validation.
struct Corpus {
  std::string training, held_out;
  std::string description;  ///< what was read and what is held out, for people
};

/// The plays, of which three whole ones are held out, or the user's text where `recipe.text` is
/// set, of which the last tenth is: windows drawn at random all over would put pieces of the same
/// sentences into both. Raises std::runtime_error that says what cures it.
Corpus read_corpus(const Recipe& recipe);

}  // namespace language_model
