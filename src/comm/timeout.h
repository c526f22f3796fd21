#pragma once

namespace syncnorm {

/// Seconds a rank waits for the others in one operation: SYNCNORM_TIMEOUT, default 600.
double timeout_seconds();

/// This process gave up waiting for an operation that is still pending: MPI can no longer be
/// finalized in order.
void note_abandoned_operation();
/// One of those has completed after all.
void note_late_completion();
bool operation_abandoned();

}  // namespace syncnorm
