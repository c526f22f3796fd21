#include "schedule.h"

#include <algorithm>
#include <cmath>

namespace segmentation {

double learning_rate(const Recipe& recipe, double epochs_done) {
  const double total = static_cast<double>(recipe.epochs);
  const double warmup = std::min(recipe.warmup, total);
  if (epochs_done < warmup) return recipe.lr * epochs_done / warmup;
  const double t = total > warmup ? std::min(1.0, (epochs_done - warmup) / (total - warmup)) : 0;
  if (recipe.schedule == "poly") return recipe.lr * std::pow(1 - t, 0.9);
  if (recipe.schedule == "cosine") return recipe.lr * (1 + std::cos(M_PI * t)) / 2;
  return recipe.lr;
}

}  // namespace segmentation
