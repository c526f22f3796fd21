#pragma once

#include "options.h"

namespace segmentation {

/// The learning rate after `epochs_done` epochs (fractions count), so that it goes on unchanged
/// when a run resumes with other steps: linear warm-up from 0 over recipe.warmup epochs, then down
/// to 0 at the end as (1 - t)^0.9 (poly) or (1 + cos(pi t)) / 2 (cosine), or not at all.
double learning_rate(const Recipe& recipe, double epochs_done);

}  // namespace segmentation
