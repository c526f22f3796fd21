#pragma once

#include <torch/torch.h>

#include <memory>

#include "options.h"
#include "syncnorm/communicator.h"

namespace segmentation {

/// U-Net (Ronneberger et al. 2015) with padded convolutions: pictures [N, channels, H, W] of any
/// size to class scores [N, classes, H, W].
///
/// Each level is two 3x3 convolutions, each followed by the norm and ReLU; `width` channels at the
/// top, twice as many at each of the `depth` - 1 levels below.
class UNetImpl : public torch::nn::Module {
 public:
  UNetImpl(int64_t channels, int64_t classes, const Recipe& recipe);

  torch::Tensor forward(const torch::Tensor& pictures);

  /// Keeps the batch norms of --norm frozen in evaluation mode.
  void train(bool on = true) override;

  /// Sets the batch norms' running statistics to those of `pictures` in the network as it is:
  /// without them a frozen norm would divide by a variance it never saw.
  void calibrate(const torch::Tensor& pictures);

 private:
  bool frozen_;
  int64_t multiple_;  ///< height and width are padded to multiples of this
  torch::nn::ModuleList down_, up_, merge_;
  torch::nn::Conv2d head_{nullptr};
};
TORCH_MODULE(UNet);

/// The network of `recipe`, its initial weights drawn from the recipe's seed alone. --norm sync
/// takes its statistics over `comm`.
UNet build_unet(int64_t channels, int64_t classes, const Recipe& recipe,
                const std::shared_ptr<syncnorm::Communicator>& comm);

}  // namespace segmentation
