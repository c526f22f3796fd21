#pragma once

#include <memory>
#include <string>
#include <vector>

#include "syncnorm/check_layer.h"

namespace check_layer {

/// What the command line chooses.
struct Choice {
  std::string layer = "block";
  int64_t hidden = 64;
  int64_t heads = 4;
  int64_t kv_heads = 2;
  int64_t batch = 2;
  int64_t positions = 16;
  std::string residual = "sharded";
  std::string norm = "rms";
  std::string placement = "pre";
  std::string dtype = "double";
  uint64_t seed = 0;
};

/// The layers of the library by name.
const std::vector<std::string>& known_layers();

/// The check of one of them, for the group it will run on.
syncnorm::LayerCheck known_check(const Choice& choice,
                                 const std::shared_ptr<syncnorm::Communicator>& comm);

/// The check of the user's own layer in own_layer.cpp; `broken` leaves out a sum of its backward.
syncnorm::LayerCheck own_check(const Choice& choice, bool broken);

}  // namespace check_layer
