#pragma once

#include <mpi.h>

#include <string>

#include "comm/transport_error.h"

namespace syncnorm {

/// MPI's own words for `code`.
inline std::string mpi_error_text(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS)
    return "MPI error " + std::to_string(code);
  return std::string(text, length);
}

/// Raises TransportError unless `code` is MPI_SUCCESS.
inline void check_mpi(int code, const char* call) {
  if (code != MPI_SUCCESS) throw TransportError(std::string(call) + ": " + mpi_error_text(code));
}

}  // namespace syncnorm
