#include "syncnorm/communicator.h"

namespace syncnorm {
namespace {

class SelfCommunicator final : public Communicator {
 public:
  SelfCommunicator() : Communicator(0, 1, "self") {}

 private:
  void do_all_reduce(const at::Tensor&, ReduceOp) override {}
  at::Tensor do_all_gather(const at::Tensor& shard, at::IntArrayRef) override {
    return shard.clone();
  }
  at::Tensor do_reduce_scatter(const at::Tensor& tensor, at::IntArrayRef) override {
    return tensor.clone();
  }
  void do_broadcast(const at::Tensor&, int) override {}
  void do_barrier() override {}
  std::shared_ptr<Communicator> do_split(int color, int) override {
    return color < 0 ? nullptr : self_communicator();
  }
};

}  // namespace

std::shared_ptr<Communicator> self_communicator() { return std::make_shared<SelfCommunicator>(); }

}  // namespace syncnorm
