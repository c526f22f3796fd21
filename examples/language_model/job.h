#pragma once

#include <memory>

#include "common/console.h"
#include "common/device.h"
#include "common/failure.h"
#include "common/hardware.h"
#include "common/json_lines.h"
#include "common/output.h"
#include "options.h"
#include "syncnorm/environment.h"

namespace language_model {

using namespace job;  // NOLINT(google-build-using-namespace): the parts that all jobs share

/// What both kinds of job need.
struct Job {
  syncnorm::Environment& environment;
  Options options;
  Console console;
  Placement placement;

  /// All ranks, for what is on the host; tensors on the device go by placement.comm.
  syncnorm::Communicator& world() const { return *environment.world(); }
  bool is_root() const { return world().rank() == 0; }
};

/// Trains a model, or goes on with it. Returns the exit status. Collective.
int train(Job& job);

/// Writes text with a trained model. Returns the exit status. Collective.
int sample(Job& job);

}  // namespace language_model
