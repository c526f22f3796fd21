#define STB_IMAGE_IMPLEMENTATION
#define STB_IMAGE_STATIC
#define STBI_ONLY_PNG
#define STBI_ONLY_JPEG
#include <stb/stb_image.h>
#include <torch/torch.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>

#include "dataset.h"

namespace segmentation {
namespace {

namespace fs = std::filesystem;
namespace F = torch::nn::functional;
using Files = std::map<std::string, fs::path>;

std::string extension(const fs::path& path) {
  auto text = path.extension().string();
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return text;
}

bool is_jpeg(const fs::path& path) {
  return extension(path) == ".jpg" || extension(path) == ".jpeg";
}

/// PNG and JPEG files of `folder` by stem.
Files list_pictures(const std::string& folder) {
  if (!fs::is_directory(folder)) throw std::runtime_error(folder + " is not a folder");
  Files files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto& path = entry.path();
    if (!entry.is_regular_file() || (extension(path) != ".png" && !is_jpeg(path))) continue;
    const auto [at, inserted] = files.emplace(path.stem().string(), path);
    if (!inserted) {
      throw std::runtime_error(at->second.string() + " and " + path.string() +
                               " have the same stem; pairs are matched by it, so keep one of them");
    }
  }
  if (files.empty()) throw std::runtime_error(folder + " holds no .png, .jpg or .jpeg file");
  return files;
}

/// "a, b, c and 4 more" of the keys in `files` that `others` lacks; empty where there is none.
std::string missing_from(const Files& others, const Files& files) {
  constexpr int64_t kNamed = 5;
  std::string text;
  int64_t count = 0;
  for (const auto& [stem, path] : files) {
    if (others.count(stem) > 0) continue;
    if (count++ < kNamed) text += (text.empty() ? "" : ", ") + stem;
  }
  if (count > kNamed) text += " and " + std::to_string(count - kNamed) + " more";
  return text;
}

void check_stems(const Files& images, const Files& masks, const Recipe& recipe) {
  const auto without_mask = missing_from(masks, images);
  const auto without_image = missing_from(images, masks);
  std::string message;
  if (!without_mask.empty()) message += "no mask in " + recipe.masks + " for " + without_mask;
  if (!without_image.empty()) {
    message +=
        (message.empty() ? "" : "; ") + ("no image in " + recipe.images + " for " + without_image);
  }
  if (!message.empty()) {
    throw std::runtime_error(
        message + ". An image and its mask need the same file name up to the extension.");
  }
}

/// Decoded pixels as uint8 [height, width, channels], 1 or 3 channels: transparency is dropped.
torch::Tensor read_pixels(const fs::path& path) {
  int width = 0, height = 0, channels = 0;
  if (stbi_info(path.c_str(), &width, &height, &channels) == 0) {
    throw std::runtime_error("cannot read " + path.string() + ": " + stbi_failure_reason());
  }
  const int wanted = channels < 3 ? 1 : 3;
  const std::unique_ptr<stbi_uc, void (*)(void*)> pixels(
      stbi_load(path.c_str(), &width, &height, &channels, wanted), stbi_image_free);
  if (!pixels)
    throw std::runtime_error("cannot read " + path.string() + ": " + stbi_failure_reason());
  return torch::from_blob(pixels.get(), {height, width, wanted}, torch::kUInt8).clone();
}

std::string size_text(int64_t height, int64_t width) {
  return std::to_string(height) + "x" + std::to_string(width);
}

std::string size_text(const torch::Tensor& pixels) {
  return size_text(pixels.size(0), pixels.size(1));
}

/// Reads masks into class indices.
class MaskReader {
 public:
  explicit MaskReader(const Recipe& recipe) : classes_(recipe.classes) {
    for (const auto& color : recipe.palette) palette_.push_back(parse_color(color));
    if (!palette_.empty()) classes_ = static_cast<int64_t>(palette_.size());
  }

  /// uint8 [height, width] of class indices and kIgnoredLabel.
  torch::Tensor read(const fs::path& path) const {
    const auto pixels = read_pixels(path);
    return palette_.empty() ? indices(pixels, path) : from_palette(pixels, path);
  }

  int64_t classes() const { return classes_; }
  const std::vector<Color>& palette() const { return palette_; }

 private:
  torch::Tensor indices(const torch::Tensor& pixels, const fs::path& path) const {
    if (pixels.size(2) != 1) {
      throw std::runtime_error(
          "mask " + path.string() +
          " is in colour, not of class indices; give its colours in class order, as in "
          "--palette 000000,ff0000,00ff00");
    }
    if (is_jpeg(path)) {
      throw std::runtime_error(
          "mask " + path.string() +
          " is a JPEG, whose compression changes class indices; save masks as PNG, or "
          "paint classes in distant colours and name them with --palette");
    }
    const auto mask = pixels.squeeze(2);
    const auto limit = classes_ > 0 ? classes_ : kIgnoredLabel;
    const auto wrong = mask.ge(limit).logical_and_(mask.ne(kIgnoredLabel)).nonzero();
    if (wrong.size(0) > 0) {
      const auto y = wrong[0][0].item<int64_t>(), x = wrong[0][1].item<int64_t>();
      throw std::runtime_error("mask " + path.string() + " holds class " +
                               std::to_string(mask[y][x].item<int64_t>()) + " at row " +
                               std::to_string(y) + ", column " + std::to_string(x) +
                               ", but --classes " + std::to_string(classes_) + " allows 0 to " +
                               std::to_string(classes_ - 1) + " (and 255, ignored)");
    }
    return mask;
  }

  /// Exact colours in PNG files; the nearest in JPEG files, which do not keep colours exactly.
  torch::Tensor from_palette(const torch::Tensor& pixels, const fs::path& path) const {
    const auto rgb = pixels.expand({-1, -1, 3}).to(torch::kInt);
    std::vector<torch::Tensor> distances;
    for (const auto& color : palette_) {
      const auto entry = torch::tensor({int{color[0]}, int{color[1]}, int{color[2]}}, torch::kInt);
      distances.push_back((rgb - entry).square().sum(2));
    }
    const auto [distance, index] = torch::stack(distances).min(0);
    const auto unknown =
        is_jpeg(path) ? torch::empty({0, 2}, torch::kLong) : distance.gt(0).nonzero();
    if (unknown.size(0) > 0) {
      const auto y = unknown[0][0].item<int64_t>(), x = unknown[0][1].item<int64_t>();
      char text[8];
      std::snprintf(text, sizeof text, "%02x%02x%02x", rgb[y][x][0].item<int>(),
                    rgb[y][x][1].item<int>(), rgb[y][x][2].item<int>());
      throw std::runtime_error("mask " + path.string() + " has colour " + text + " at row " +
                               std::to_string(y) + ", column " + std::to_string(x) +
                               ", which --palette does not list");
    }
    return index.to(torch::kUInt8);
  }

  int64_t classes_;
  std::vector<Color> palette_;
};

/// [height, width, channels] sampled to `size`; `nearest` keeps class indices whole.
torch::Tensor resize(const torch::Tensor& pixels, const Size& size, bool nearest) {
  if (pixels.size(0) == size.height && pixels.size(1) == size.width) return pixels;
  auto options = F::InterpolateFuncOptions().size(std::vector<int64_t>{size.height, size.width});
  if (nearest) {
    options.mode(torch::kNearestExact);
  } else {
    options.mode(torch::kBilinear).align_corners(false).antialias(true);
  }
  const auto planes = pixels.permute({2, 0, 1}).unsqueeze(0).to(torch::kFloat);
  return F::interpolate(planes, options)
      .round_()
      .clamp_(0, 255)
      .to(torch::kUInt8)
      .squeeze(0)
      .permute({1, 2, 0});
}

/// Well separated colours for classes that came without a palette.
std::vector<Color> spread_colors(int64_t classes) {
  std::vector<Color> colors = {{16, 18, 24}};
  for (int64_t i = 1; i < classes; ++i) {
    // Golden-ratio steps in hue keep any two neighbours apart.
    const double hue = std::fmod(0.08 + 0.618034 * static_cast<double>(i), 1.0) * 6;
    Color color;
    for (int channel = 0; channel < 3; ++channel) {
      const double k = std::fmod(5 - 2 * channel + hue, 6.0);
      const double dip = std::clamp(std::min(k, 4 - k), 0.0, 1.0);
      color[channel] = static_cast<uint8_t>(235 * (1 - 0.62 * dip));
    }
    colors.push_back(color);
  }
  return colors;
}

/// The number of classes where nobody told: one more than the largest index.
int64_t count_classes(const torch::Tensor& labels) {
  const auto counted = labels.masked_select(labels.ne(kIgnoredLabel));
  const auto classes = counted.numel() > 0 ? counted.max().item<int64_t>() + 1 : 0;
  if (classes < 2) {
    throw std::runtime_error(
        "the masks hold no class but 0 (255 means: do not count this pixel). For masks of 0 and "
        "255 give "
        "--palette 000000,ffffff");
  }
  return classes;
}

}  // namespace

Dataset load_pairs(const Recipe& recipe) {
  const auto image_files = list_pictures(recipe.images);
  const auto mask_files = list_pictures(recipe.masks);
  check_stems(image_files, mask_files, recipe);

  const MaskReader reader(recipe);
  auto size = picture_size(recipe);
  const bool resized = size.has_value();
  std::vector<torch::Tensor> images, labels;
  Dataset dataset;
  bool in_color = false;
  for (const auto& [stem, path] : image_files) {
    const auto pixels = read_pixels(path);
    const auto& mask_path = mask_files.at(stem);
    const auto mask = reader.read(mask_path).unsqueeze(2);
    if (pixels.size(0) != mask.size(0) || pixels.size(1) != mask.size(1)) {
      throw std::runtime_error(path.string() + " is " + size_text(pixels) +
                               " pixels but its mask " + mask_path.string() + " is " +
                               size_text(mask));
    }
    if (!size) size = Size{pixels.size(0), pixels.size(1)};
    if (!resized && (pixels.size(0) != size->height || pixels.size(1) != size->width)) {
      throw std::runtime_error(
          path.string() + " is " + size_text(pixels) + " pixels, the pictures before it " +
          size_text(size->height, size->width) + "; bring all to one size with --size " +
          size_text(size->height, size->width));
    }
    in_color = in_color || pixels.size(2) == 3;
    images.push_back(resize(pixels, *size, /*nearest=*/false));
    labels.push_back(resize(mask, *size, /*nearest=*/true).squeeze(2));
    dataset.names.push_back(stem);
  }
  for (auto& image : images) image = image.expand({-1, -1, in_color ? 3 : 1}).permute({2, 0, 1});

  dataset.images = torch::stack(images).contiguous();
  dataset.labels = torch::stack(labels).contiguous();
  const auto classes = reader.classes() > 0 ? reader.classes() : count_classes(dataset.labels);
  for (int64_t i = 0; i < classes; ++i) dataset.class_names.push_back("class " + std::to_string(i));
  dataset.class_colors = reader.palette().empty() ? spread_colors(classes) : reader.palette();
  split_in_blocks(dataset.images.size(0), recipe.test_fraction.value_or(0.2),
                  recipe.test_blocks.value_or(1), recipe.gap.value_or(0), dataset.train,
                  dataset.test);
  dataset.description =
      std::to_string(images.size()) + (in_color ? " colour" : " gray") + " pictures of " +
      size_text(size->height, size->width) + " in " + std::to_string(classes) + " classes from " +
      recipe.images + "\n" + std::to_string(dataset.train.size()) + " to train on, " +
      std::to_string(dataset.test.size()) + " held out for test: in order of name, numbers " +
      ranges(dataset.test) + " (from " + dataset.names[dataset.test.front()] + " to " +
      dataset.names[dataset.test.back()] + ")";
  return dataset;
}

}  // namespace segmentation
