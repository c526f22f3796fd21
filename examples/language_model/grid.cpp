#include "grid.h"

namespace language_model {

Grid::Grid(std::shared_ptr<syncnorm::Communicator> all, int64_t tensor_parallel)
    : world(std::move(all)) {
  const int width = tensor_parallel == 0 ? world->size() : static_cast<int>(tensor_parallel);
  tensor = world->split(world->rank() / width, world->rank());
  data = world->split(world->rank() % width, world->rank());
}

Grid::Share Grid::share(int64_t total) const {
  const int64_t first = total * data->rank() / data->size();
  return {first, total * (data->rank() + 1) / data->size() - first};
}

}  // namespace language_model
