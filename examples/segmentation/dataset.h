#pragma once

#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "options.h"

namespace segmentation {

/// Label of pixels that neither the loss nor the scores count.
constexpr int64_t kIgnoredLabel = 255;

using Color = std::array<uint8_t, 3>;

/// Pictures with a class for each pixel, all of one size, in memory as bytes.
struct Dataset {
  torch::Tensor images;  ///< uint8 [N, channels, height, width]
  torch::Tensor labels;  ///< uint8 [N, height, width], class index or kIgnoredLabel
  std::vector<std::string> names;
  std::vector<std::string> class_names;
  std::vector<Color> class_colors;
  std::vector<int64_t> train, test;  ///< indices into the first dimension
  torch::Tensor mean, deviation;     ///< float [channels], of the training pixels in units of 0..1
  std::string description;           ///< what was read and how it was split, for people

  int64_t channels() const { return images.size(1); }
  int64_t height() const { return images.size(2); }
  int64_t width() const { return images.size(3); }
  int64_t classes() const { return static_cast<int64_t>(class_names.size()); }

  /// Changes when a pixel, a label or the split does: tells whether a checkpoint or another rank
  /// saw the same data.
  std::string checksum() const;
};

/// Reads the brain volume, or the user's pairs where `recipe.images` is set. Raises
/// std::runtime_error saying what is wrong with which file and what cures it.
Dataset load_dataset(const Recipe& recipe);

/// Axial slices of the MNI ICBM152 average brain (T1), labelled by its grey- and white-matter maps.
Dataset load_brain_slices(const Recipe& recipe);

/// Pictures and masks matched by file stem.
Dataset load_pairs(const Recipe& recipe);

/// Where samples 0..count go: `blocks` contiguous runs spread evenly make up `fraction` of them and
/// are held out for test; `gap` samples on either side of each run are left out of both.
/// Neighbouring samples are near copies of each other (slices of one head, frames of one film), so
/// a random split would test on the training pictures.
void split_in_blocks(int64_t count, double fraction, int64_t blocks, int64_t gap,
                     std::vector<int64_t>& train, std::vector<int64_t>& test);

/// "0-9, 23, 40-41" for ascending numbers.
std::string ranges(const std::vector<int64_t>& numbers);

}  // namespace segmentation
