#pragma once

#include <cstdint>

namespace syncnorm {

/// Elements (bytes where types do not matter) that one MPI call may count, 2^31-1 unless lowered;
/// returns the old value. For tests of the splitting, which would need gigabytes otherwise.
int64_t set_max_count(int64_t count);

}  // namespace syncnorm
