#pragma once

#include <string>

#include "common/console.h"
#include "common/device.h"
#include "common/failure.h"
#include "common/hardware.h"
#include "common/json_lines.h"
#include "common/output.h"
#include "dataset.h"
#include "options.h"
#include "syncnorm/environment.h"

namespace segmentation {

using namespace job;  // NOLINT(google-build-using-namespace): the parts that all jobs share

/// What every kind of job needs.
struct Job {
  syncnorm::Environment& environment;
  Options options;
  Console console;
  Placement placement;

  /// All ranks, for what is on the host; tensors on the device go by placement.comm.
  syncnorm::Communicator& world() const { return *environment.world(); }
  bool is_root() const { return world().rank() == 0; }
};

/// Trains, tests and draws one network, or goes on with it. Returns the exit status. Collective.
int train(Job& job);

/// Trains with batch, sync and group norm at several batch sizes and seeds. Returns the exit
/// status. Collective.
int compare(Job& job);

/// Loads the data on every rank and says what they are; raises Failure on all ranks where one
/// cannot, or holds other data. Collective.
Dataset load_data(Job& job);

}  // namespace segmentation
