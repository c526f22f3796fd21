#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>

namespace job {

/// What --precision means for this thread while it lives: with "bfloat16", convolutions, matrix
/// products and attention on `device` compute in bfloat16, from parameters that stay as they are;
/// with "float" nothing changes. For the forward pass only: backward repeats its choices. What it
/// replaces comes back when it ends, in the reverse order where several live.
class Autocast {
 public:
  Autocast(c10::Device device, const std::string& precision);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType device_;
  bool active_, was_enabled_;
  c10::ScalarType previous_;
};

}  // namespace job
