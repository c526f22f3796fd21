#include "autograd/input.h"

namespace syncnorm {

at::ScalarType compute_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

ChannelInput::ChannelInput(const at::Tensor& tensor)
    : data(tensor.detach()), format(tensor.suggest_memory_format()) {
  data = data.to(compute_dtype(tensor.scalar_type())).contiguous(format);
  const int64_t samples = tensor.size(0);
  const int64_t channels = tensor.size(1);
  const int64_t space = samples * channels > 0 ? tensor.numel() / (samples * channels) : 0;
  const bool interleaved = format != at::MemoryFormat::Contiguous || space == 1;
  layout = interleaved ? kernels::SlotLayout{samples * space, channels, 1}
                       : kernels::SlotLayout{samples, channels, space};
}

at::Tensor ChannelInput::match(const at::Tensor& tensor) const {
  return tensor.detach().to(data.scalar_type()).contiguous(format);
}

}  // namespace syncnorm
