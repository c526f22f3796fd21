#pragma once

#include "options.h"

namespace language_model {

/// The learning rate of step `step`, counted from 0: a linear warm-up over recipe.warmup steps,
/// then cosine down to a tenth of recipe.lr at recipe.steps, or no change.
double learning_rate(const Recipe& recipe, int64_t step);

}  // namespace language_model
