#include "schedule.h"

#include <algorithm>
#include <cmath>

namespace language_model {

double learning_rate(const Recipe& recipe, int64_t step) {
  constexpr double kFloor = 0.1;
  const auto done = static_cast<double>(step);
  if (done + 1 < recipe.warmup) return recipe.lr * (done + 1) / recipe.warmup;
  if (recipe.schedule == "constant") return recipe.lr;
  const double decay = static_cast<double>(recipe.steps) - recipe.warmup;
  const double t = decay > 0 ? std::clamp((done - recipe.warmup) / decay, 0.0, 1.0) : 1.0;
  return recipe.lr * (kFloor + (1 - kFloor) * (1 + std::cos(M_PI * t)) / 2);
}

}  // namespace language_model
