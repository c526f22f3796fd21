#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "tokenizer.h"

namespace language_model {

/// How far a run has come.
struct Position {
  int64_t step = 0;  ///< steps taken
  double loss = 0;   ///< summed over the steps since the last line of the log
  int64_t since_log = 0;
};

/// What a checkpoint says of itself beside its tensors.
struct Header {
  nlohmann::json recipe;
  Position position;
  std::string checksum;  ///< of the tokens it was trained on
  Tokenizer tokenizer;
};

/// The metadata of a checkpoint, and back; the latter raises std::runtime_error where `folder`
/// holds no checkpoint of this program.
std::map<std::string, std::string> to_metadata(const Header& header);
Header read_header(const std::string& folder);

}  // namespace language_model
