#pragma once

#include <string>
#include <vector>

#include "syncnorm/sharding.h"

namespace syncnorm {

/// Raises c10::Error that names the tensor unless all are defined, dense, named once, cut for a
/// group like `comm`, and of the size that their sharding says.
void check_shards(const std::vector<ShardedTensor>& tensors, const Communicator& comm,
                  const std::string& who);

/// What does not fit between the wanted names and those given, for messages.
class Mismatches {
 public:
  void missing(const std::string& name) { missing_.push_back(name); }
  void unexpected(const std::string& name) { unexpected_.push_back(name); }
  void different(const std::string& name, const std::string& how) {
    different_.push_back(name + " (" + how + ")");
  }
  /// " Missing: ... Unexpected: ... Different: ..."; empty where all fits.
  std::string text() const;

 private:
  std::vector<std::string> missing_;
  std::vector<std::string> unexpected_;
  std::vector<std::string> different_;
};

/// Whether values of one dtype may be copied into the other: equal, or both floating point.
bool convertible(torch::ScalarType from, torch::ScalarType to);

}  // namespace syncnorm
