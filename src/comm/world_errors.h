#pragma once

namespace syncnorm {

/// Open MPI reports the failure of a nonblocking collective to MPI_COMM_WORLD's error handler,
/// whatever communicator it ran on, and the default handler ends the job without naming the
/// operation. While a guard lives on this thread such errors come back as return codes; everybody
/// else's errors on MPI_COMM_WORLD stay as fatal as they were.
class ReturnWorldErrors {
 public:
  ReturnWorldErrors();
  ~ReturnWorldErrors();
  ReturnWorldErrors(const ReturnWorldErrors&) = delete;
  ReturnWorldErrors& operator=(const ReturnWorldErrors&) = delete;

  /// Puts the handler that knows the guards in the place of MPI_ERRORS_ARE_FATAL; leaves a user's
  /// own handler alone. Once.
  static void install();
};

}  // namespace syncnorm
