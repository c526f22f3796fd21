// A layer of your own, and the few lines that check it.
#include "layers.h"
#include "syncnorm/collectives.h"
#include "syncnorm/sharding.h"

namespace check_layer {
namespace {

using syncnorm::Communicator;
using syncnorm::Sharding;

/// y = sum over ranks of tanh(x A_r^T) B_r: features between the two products split over ranks.
class OwnLayer : public torch::nn::Module {
 public:
  OwnLayer(int64_t hidden, std::shared_ptr<Communicator> comm, bool broken)
      : comm_(std::move(comm)), broken_(broken) {
    const auto mine = syncnorm::balanced_shards(2 * hidden, comm_->size())[comm_->rank()];
    const double scale = 1 / std::sqrt(static_cast<double>(hidden));
    a_ = register_parameter("a", torch::randn({mine, hidden}) * scale);
    b_ = register_parameter("b", torch::randn({mine, hidden}) * scale);
  }

  torch::Tensor forward(const torch::Tensor& x) {
    // Each rank uses x for its own features: its gradient is the sum of what all ranks find.
    const auto shared = broken_ ? x : syncnorm::copy_to_ranks(x, comm_, "own");
    const auto part = torch::matmul(torch::tanh(torch::matmul(shared, a_.t())), b_);
    return syncnorm::reduce_from_ranks(part, comm_, "own");
  }

 private:
  std::shared_ptr<Communicator> comm_;
  bool broken_;
  torch::Tensor a_, b_;
};

}  // namespace

syncnorm::LayerCheck own_check(const Choice& choice, bool broken) {
  syncnorm::LayerCheck check;
  check.name = broken ? "own layer without its sum in backward" : "own layer";
  check.make = [=](const std::shared_ptr<Communicator>& comm) {
    return std::make_shared<OwnLayer>(choice.hidden, comm, broken);
  };
  check.forward = [](torch::nn::Module& layer, const torch::Tensor& x) {
    return dynamic_cast<OwnLayer&>(layer).forward(x);
  };
  check.input_shape = {choice.batch, choice.positions, choice.hidden};
  check.parameter_sharding = [=](const std::string&, const std::shared_ptr<Communicator>& comm) {
    return Sharding::consecutive(comm, 0,
                                 syncnorm::balanced_shards(2 * choice.hidden, comm->size()));
  };
  check.forward_collectives = 1;
  check.backward_collectives = 1;
  return check;
}

}  // namespace check_layer
