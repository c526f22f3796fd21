#pragma once

#include "syncnorm/error.h"

namespace syncnorm {

/// The transport returned an error code, most often because the ranks brought different sizes or
/// operations.
class TransportError : public CommunicationError {
 public:
  using CommunicationError::CommunicationError;
};

}  // namespace syncnorm
