#include <nifti2_io.h>
#include <torch/torch.h>

#include <filesystem>
#include <memory>
#include <stdexcept>

#include "dataset.h"

namespace segmentation {
namespace {

namespace fs = std::filesystem;
namespace F = torch::nn::functional;

constexpr int64_t kDefaultHeight = 112, kDefaultWidth = 96;
/// Slices where the brain fills less of the picture than this hold next to nothing to learn.
constexpr double kLeastBrain = 0.05;
constexpr int64_t kMargin = 4;  ///< millimetres of background round the brain

/// One volume as uint8 [slices, rows, columns]: inferior to superior, posterior to anterior, left
/// to right.
torch::Tensor read_volume(const fs::path& path) {
  const std::unique_ptr<nifti_image, void (*)(nifti_image*)> image(
      nifti_image_read(path.c_str(), /*read_data=*/1), nifti_image_free);
  if (!image || !image->data) {
    throw std::runtime_error(
        path.string() + " is not a readable NIfTI volume; remove it and run launch/setup again");
  }
  if (image->datatype != NIFTI_TYPE_UINT8 || image->nz < 2 || image->nt > 1) {
    throw std::runtime_error(path.string() + " holds " + nifti_datatype_string(image->datatype) +
                             " values in " + std::to_string(image->ndim) +
                             " dimensions; a volume of UINT8 in 3 dimensions was expected");
  }
  return torch::from_blob(image->data, {image->nz, image->ny, image->nx}, torch::kUInt8).clone();
}

torch::Tensor read_map(const std::string& folder, const std::string& kind) {
  const auto path =
      fs::path(folder) / ("mni_icbm152_" + kind + "_tal_nlin_sym_09a_converted.nii.gz");
  if (!fs::exists(path)) {
    throw std::runtime_error(
        "the brain volume is missing: no " + path.string() +
        ". Run launch/setup, which fetches it, or name its folder with --data.");
  }
  return read_volume(path);
}

/// Rows and columns [begin, end) of the picture plane; may reach outside the volume.
struct Window {
  int64_t top, bottom, left, right;
};

/// The brain's bounding box over all slices with a margin, grown to height : width.
Window window_round(const torch::Tensor& brain, int64_t height, int64_t width) {
  const auto span = [](const torch::Tensor& occupied) {
    const auto where = occupied.nonzero();
    return std::make_pair(where.min().item<int64_t>() - kMargin,
                          where.max().item<int64_t>() + 1 + kMargin);
  };
  auto [top, bottom] = span(brain.any(0).any(1));
  auto [left, right] = span(brain.any(0).any(0));
  const auto tall = std::max(bottom - top, ((right - left) * height + width - 1) / width);
  const auto wide = std::max(right - left, ((bottom - top) * width + height - 1) / height);
  top -= (tall - (bottom - top)) / 2;
  left -= (wide - (right - left)) / 2;
  return {top, top + tall, left, left + wide};
}

/// Cuts `window` out of [slices, rows, columns], samples it down to height x width with an
/// antialiasing filter and turns the front of the head to the top of the picture. Returns float
/// [slices, 1, height, width].
torch::Tensor resample(const torch::Tensor& volume, const Window& window, int64_t height,
                       int64_t width) {
  const std::vector<int64_t> padding = {-window.left, window.right - volume.size(2), -window.top,
                                        window.bottom - volume.size(1)};
  const auto cut = torch::constant_pad_nd(volume.to(torch::kFloat), padding).unsqueeze(1);
  const auto options = F::InterpolateFuncOptions()
                           .size(std::vector<int64_t>{height, width})
                           .mode(torch::kBilinear)
                           .align_corners(false)
                           .antialias(true);
  return F::interpolate(cut, options).flip({2});
}

}  // namespace

Dataset load_brain_slices(const Recipe& recipe) {
  const auto t1 = read_map(recipe.data, "t1");
  const auto grey = read_map(recipe.data, "gm");
  const auto white = read_map(recipe.data, "wm");
  if (t1.sizes() != grey.sizes() || t1.sizes() != white.sizes()) {
    throw std::runtime_error("the volumes in " + recipe.data +
                             " differ in size; remove them and run launch/setup again");
  }
  const auto [height, width] = picture_size(recipe).value_or(Size{kDefaultHeight, kDefaultWidth});

  // The T1 volume comes with everything outside the brain set to zero.
  const auto brain = t1.gt(0);
  const auto window = window_round(brain, height, width);
  const auto inside = resample(brain, window, height, width).squeeze(1);
  const auto p_grey = resample(grey, window, height, width).squeeze(1).div_(255);
  const auto p_white = resample(white, window, height, width).squeeze(1).div_(255);
  const auto p_other = inside - p_grey - p_white;
  const auto tissue = torch::stack({p_grey, p_white, p_other}).argmax(0) + 1;

  const auto filled = inside.mean(torch::IntArrayRef{1, 2}).ge(kLeastBrain).nonzero().squeeze(1);
  Dataset dataset;
  dataset.images = resample(t1, window, height, width)
                       .round_()
                       .clamp_(0, 255)
                       .to(torch::kUInt8)
                       .index_select(0, filled);
  dataset.labels =
      torch::where(inside.ge(0.5), tissue, 0).to(torch::kUInt8).index_select(0, filled);
  const auto first = filled[0].item<int64_t>();
  for (int64_t i = 0; i < filled.size(0); ++i)
    dataset.names.push_back("slice " + std::to_string(first + i));
  dataset.class_names = {"background", "grey matter", "white matter", "other tissue"};
  dataset.class_colors = {{{16, 18, 24}, {86, 156, 214}, {244, 214, 122}, {176, 124, 216}}};

  split_in_blocks(filled.size(0), recipe.test_fraction.value_or(0.2),
                  recipe.test_blocks.value_or(3), recipe.gap.value_or(3), dataset.train,
                  dataset.test);
  auto slices = dataset.test;
  for (auto& slice : slices) slice += first;
  dataset.description =
      "MNI ICBM152 average brain, " + std::to_string(filled.size(0)) + " axial slices of " +
      std::to_string(height) + "x" + std::to_string(width) +
      "; each pixel is the likeliest of grey matter, white matter and " +
      "other tissue (the rest of the brain), or background\n" +
      std::to_string(dataset.train.size()) + " slices to train on, " +
      std::to_string(dataset.test.size()) + " held out for test (slices " + ranges(slices) + "), " +
      std::to_string(filled.size(0) -
                     static_cast<int64_t>(dataset.train.size() + dataset.test.size())) +
      " beside them left out: neighbouring slices are near copies, so a random split would test on "
      "training pictures";
  return dataset;
}

}  // namespace segmentation
