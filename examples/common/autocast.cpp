#include "common/autocast.h"

#include <ATen/autocast_mode.h>

namespace job {

namespace autocast = at::autocast;

Autocast::Autocast(c10::Device device, const std::string& precision)
    : device_(device.type()),
      active_(precision == "bfloat16"),
      was_enabled_(autocast::is_autocast_enabled(device_)),
      previous_(autocast::get_autocast_dtype(device_)) {
  if (!active_) return;
  autocast::set_autocast_enabled(device_, true);
  autocast::set_autocast_dtype(device_, c10::kBFloat16);
  autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (!active_) return;
  // The parameters' bfloat16 copies are of this forward: the optimizer is about to change them.
  if (autocast::decrement_nesting() == 0) autocast::clear_cache();
  autocast::set_autocast_dtype(device_, previous_);
  autocast::set_autocast_enabled(device_, was_enabled_);
}

}  // namespace job
