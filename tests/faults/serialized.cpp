// MPI initialised by the program, for one thread at a time: SyncBatchNorm on the main thread and
// another communicator's collectives on a second thread take turns and finish.
#include <mpi.h>
#include <torch/torch.h>

#include <cstdio>
#include <thread>

#include "syncnorm/mpi.h"
#include "syncnorm/syncnorm.h"

int main(int argc, char** argv) {
  int provided = MPI_THREAD_SINGLE;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  int failures = 0;
  {
    syncnorm::Environment environment(argc, argv);
    const auto& world = environment.world();
    const auto other = world->split(0, world->rank());
    std::thread worker([&] {
      for (int i = 0; i < 200; ++i) {
        // Small and large, so that both of the backend's ways meet the lock.
        auto tensor = torch::ones({i % 2 == 0 ? 8 : 20000});
        other->all_reduce(tensor);
        if (tensor.min().item<float>() != static_cast<float>(world->size())) ++failures;
      }
    });
    syncnorm::SyncBatchNorm norm(4);
    for (int i = 0; i < 200; ++i) {
      auto x = torch::randn({2, 4, 3}).set_requires_grad(true);
      norm->forward(x).square().sum().backward();
    }
    worker.join();
    std::printf("rank %d: thread level %s, %d failures\n", world->rank(),
                provided == MPI_THREAD_SERIALIZED ? "serialized" : "other", failures);
  }
  MPI_Finalize();
  return failures;
}
