#pragma once

#include <string>

#include "console.h"
#include "dataset.h"
#include "options.h"
#include "syncnorm/environment.h"

namespace segmentation {

/// What every kind of job needs.
struct Job {
  syncnorm::Environment& environment;
  Options options;
  Console console;

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

/// "2 ranks on 1 node, 1 thread each; AMD EPYC, 2 cores; LibTorch 2.11.0". Collective.
std::string hardware(const Job& job);

}  // namespace segmentation
