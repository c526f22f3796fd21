// A training step in which rank 1 misbehaves as the first argument says. Every mode must end the
// whole job soon, with a non-zero status and a message that names what happened; the ctest entries
// beside this file say which message.
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "syncnorm/syncnorm.h"

namespace {

struct Job {
  const std::shared_ptr<syncnorm::Communicator>& comm;
  syncnorm::SyncBatchNorm first;
  syncnorm::SyncBatchNorm second;
  bool odd;

  torch::Tensor input() const { return torch::randn({2, 3, 4}).set_requires_grad(true); }
  torch::Tensor step() { return second->forward(first->forward(input())).square().sum(); }
};

syncnorm::SyncBatchNorm layer(const char* name, int64_t channels = 3) {
  return syncnorm::SyncBatchNorm(syncnorm::SyncBatchNormOptions(channels).name(name));
}

void sleep_long() { std::this_thread::sleep_for(std::chrono::seconds(60)); }

/// Raises on every rank in the midst of a backward pass.
torch::Tensor failing_backward(const torch::Tensor& x, bool fail) {
  auto y = x * 1;
  y.register_hook([fail](const torch::Tensor& gradient) {
    if (fail) throw std::runtime_error("rank 1 fails in backward");
    return gradient;
  });
  return y;
}

// Rank 1 leaves the step in one of many ways; the others go on and must not wait for ever.
const std::map<std::string, std::function<void(Job&)>> kModes = {
    {"throw",
     [](Job& job) {
       if (job.odd) throw std::runtime_error("rank 1 fails in forward");
       job.step();
     }},
    {"throw_in_backward",
     [](Job& job) {
       const auto y = failing_backward(job.first->forward(job.input()), job.odd);
       y.square().sum().backward();
     }},
    {"exit",
     [](Job& job) {
       job.step();
       if (job.odd) std::_Exit(3);
       job.step();
     }},
    {"return",
     [](Job& job) {
       job.step();
       if (!job.odd) job.step();
     }},
    {"kill",
     [](Job& job) {
       job.step();
       if (job.odd) raise(SIGKILL);
       job.step();
     }},
    {"kill_in_backward",
     [](Job& job) {
       const auto loss = job.step();
       if (job.odd) raise(SIGKILL);
       loss.backward();
     }},
    {"hang",
     [](Job& job) {
       job.step();
       if (job.odd) sleep_long();
       job.step();
     }},
    {"hang_elsewhere",
     [](Job& job) {
       const auto other = job.comm->split(0, job.comm->rank());
       job.step();
       if (job.odd) {
         // So that the other rank's time is up first, while this one still waits.
         std::this_thread::sleep_for(std::chrono::seconds(1));
         const syncnorm::ModuleScope scope("somewhere else");
         other->all_reduce(torch::ones({4}));
       }
       job.step();
     }},
    {"order",
     [](Job& job) {
       const auto x = job.input();
       job.odd ? job.second->forward(job.first->forward(x))
               : job.first->forward(job.second->forward(x));
     }},
    {"skip",
     [](Job& job) {
       if (!job.odd) job.first->forward(job.input());
       job.second->forward(job.input());
     }},
    {"channels",
     [](Job& job) {
       const int64_t channels = job.odd ? 5 : 3;
       layer("uneven", channels)->forward(torch::randn({2, channels}));
     }},
    {"channels_large",
     [](Job& job) {
       const int64_t channels = job.odd ? 9000 : 6000;
       layer("uneven", channels)->forward(torch::randn({2, channels}));
     }},
    {"eps",
     [](Job& job) {
       if (job.odd) job.first->options.eps(0.5);
       job.step();
     }},
    {"operation",
     [](Job& job) {
       const auto tensor = torch::ones({100000});
       job.odd ? job.comm->broadcast(tensor, 0) : job.comm->all_reduce(tensor);
     }},
    {"none", [](Job& job) { job.step().backward(); }},
};

}  // namespace

int main(int argc, char** argv) {
  try {
    syncnorm::Environment environment(argc, argv);
    const std::string mode = argc > 1 ? argv[1] : "";
    const auto found = kModes.find(mode);
    if (found == kModes.end()) {
      std::fprintf(stderr, "unknown mode '%s'\n", mode.c_str());
      return 2;
    }
    Job job{environment.world(), layer("first"), layer("second"), environment.world()->rank() == 1};
    found->second(job);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
