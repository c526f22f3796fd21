#include "comm/nccl/communicator.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "comm/board_line.h"
#include "comm/nccl/join.h"
#include "comm/nccl/watched_comm.h"
#include "syncnorm/nccl.h"

namespace syncnorm::nccl {
namespace {

ncclDataType_t nccl_datatype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return ncclFloat64;
    case at::kFloat:
      return ncclFloat32;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kLong:
      return ncclInt64;
    case at::kInt:
      return ncclInt32;
    case at::kChar:
      return ncclInt8;
    case at::kByte:
      return ncclUint8;
    default:
      TORCH_CHECK_TYPE(false, "the NCCL backend cannot reduce dtype ", dtype);
  }
}

ncclRedOp_t nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return ncclSum;
    case ReduceOp::max:
      return ncclMax;
    case ReduceOp::min:
      return ncclMin;
  }
  TORCH_CHECK_VALUE(false, "unknown reduction ", static_cast<int>(op));
}

bool all_equal(at::IntArrayRef sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [&](int64_t size) { return size == sizes[0]; });
}

/// Elements of a row of a tensor that has `shape`.
int64_t row_of(at::IntArrayRef shape) { return c10::multiply_integers(shape.slice(1)); }

/// The calls that `body(r)` makes for each rank r in one group: the first result that is no
/// success, if there is one.
template <typename F>
ncclResult_t grouped(const NcclApi& nccl, int ranks, const F& body) {
  ncclResult_t first = nccl.group_start();
  if (first != ncclSuccess) return first;
  for (int r = 0; r < ranks && (first == ncclSuccess || first == ncclInProgress); ++r)
    first = body(r);
  const ncclResult_t end = nccl.group_end();  // in any case: the group must not stay open
  return first == ncclSuccess || first == ncclInProgress ? end : first;
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const Backend& backend, std::shared_ptr<Communicator> bootstrap,
                   c10::Device device, const Joined& joined, std::string name)
      : Communicator(bootstrap->rank(), bootstrap->size(), std::move(name)),
        backend_(backend),
        bootstrap_(std::move(bootstrap)),
        device_(device),
        comm_(backend, device.index(), joined.comm,
              this->name() + ", rank " + std::to_string(rank()) + " of " + std::to_string(size()),
              BoardLine(joined.uid, joined.world_ranks, rank())) {}

 private:
  void do_all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    if (!is_ours(tensor)) return bootstrap_->all_reduce(tensor, op);
    const auto wire = to_wire(tensor);
    const auto type = nccl_datatype(wire.scalar_type());
    void* data = wire.mutable_data_ptr();
    const auto count = static_cast<size_t>(wire.numel());
    queue(count, [&](const NcclApi& nccl, ncclComm_t comm, cudaStream_t stream) {
      return nccl.all_reduce(data, data, count, type, nccl_op(op), comm, stream);
    });
    if (!wire.is_same(tensor)) tensor.copy_(wire);
  }

  at::Tensor do_all_gather(const at::Tensor& shard, at::IntArrayRef sizes) override {
    if (!is_ours(shard)) return bootstrap_->all_gather(shard, sizes);
    auto shape = shard.sizes().vec();
    shape[0] = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    const auto all = at::empty(shape, shard.options());
    const auto row = static_cast<size_t>(row_of(shape)) * shard.element_size();
    const void* mine = shard.const_data_ptr();
    auto* to = static_cast<char*>(all.mutable_data_ptr());
    queue(all.numel(), [&](const NcclApi& nccl, ncclComm_t comm, cudaStream_t stream) {
      if (all_equal(sizes))
        return nccl.all_gather(mine, to, row * sizes[0], ncclUint8, comm, stream);
      return grouped(nccl, size(), [&](int r) {
        const size_t bytes = row * sizes[r];
        auto* at = std::exchange(to, to + bytes);
        if (bytes == 0) return ncclSuccess;
        return nccl.broadcast(r == rank() ? mine : at, at, bytes, ncclUint8, r, comm, stream);
      });
    });
    return all;
  }

  at::Tensor do_reduce_scatter(const at::Tensor& tensor, at::IntArrayRef sizes) override {
    if (!is_ours(tensor)) return bootstrap_->reduce_scatter(tensor, sizes);
    const auto wire = to_wire(tensor);
    auto shape = tensor.sizes().vec();
    shape[0] = sizes[rank()];
    const auto part = at::empty(shape, wire.options());
    const auto type = nccl_datatype(wire.scalar_type());
    const auto row = static_cast<size_t>(row_of(shape));
    const auto* from = static_cast<const char*>(wire.const_data_ptr());
    void* to = part.mutable_data_ptr();
    queue(wire.numel(), [&](const NcclApi& nccl, ncclComm_t comm, cudaStream_t stream) {
      if (all_equal(sizes))
        return nccl.reduce_scatter(from, to, row * sizes[0], type, ncclSum, comm, stream);
      return grouped(nccl, size(), [&](int r) {
        const size_t count = row * sizes[r];
        const auto* at = std::exchange(from, from + count * wire.element_size());
        if (count == 0) return ncclSuccess;
        return nccl.reduce(at, r == rank() ? to : nullptr, count, type, ncclSum, r, comm, stream);
      });
    });
    return part.to(tensor.scalar_type());
  }

  void do_broadcast(const at::Tensor& tensor, int root) override {
    if (!is_ours(tensor)) return bootstrap_->broadcast(tensor, root);
    void* data = tensor.mutable_data_ptr();
    queue(tensor.nbytes(), [&](const NcclApi& nccl, ncclComm_t comm, cudaStream_t stream) {
      return nccl.broadcast(data, data, tensor.nbytes(), ncclUint8, root, comm, stream);
    });
  }

  void do_barrier() override {
    const auto stream = backend_.cuda.current_stream(device_);
    TORCH_CHECK(!comm_.is_capturing(stream),
                "barrier: waits for the device, so it cannot be captured in a CUDA graph");
    const auto word = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(device_));
    do_all_reduce(word, ReduceOp::sum);
    comm_.synchronize(current(), stream);
  }

  std::shared_ptr<Communicator> do_split(int color, int key) override;

  bool gather_diagnostics(const at::Tensor& mine, at::Tensor& all, double seconds) override {
    return gather_diagnostics_of(*bootstrap_, mine, all, seconds);
  }

  void announce_failure() override { comm_.line().fail(operation().sequence); }

  Label current() const { return {describe_operation(), operation().sequence}; }

  /// Whether NCCL can reach the tensor; false for the bootstrap communicator's, in host memory.
  bool is_ours(const at::Tensor& tensor) const {
    if (tensor.device() == device_) return true;
    TORCH_CHECK(tensor.is_cpu(), describe_operation(), ": the tensor is on ", tensor.device(),
                ", this communicator on ", device_);
    return false;
  }

  /// NCCL knows no 16-bit integers; sums modulo 2^16 survive the way through 32.
  static at::Tensor to_wire(const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kShort ? tensor.to(at::kInt) : tensor;
  }

  /// Queues what `enqueue(nccl, comm, stream)` calls on the current stream. Of no elements there is
  /// nothing to call, which all ranks see alike.
  template <typename F>
  void queue(int64_t elements, const F& enqueue) {
    const auto stream = backend_.cuda.current_stream(device_);
    comm_.run(current(), stream, [&](const NcclApi& nccl, ncclComm_t comm) {
      return elements == 0 ? ncclSuccess : enqueue(nccl, comm, stream);
    });
  }

  Backend backend_;
  std::shared_ptr<Communicator> bootstrap_;
  c10::Device device_;
  WatchedComm comm_;
};

std::shared_ptr<Communicator> make(const Backend& backend, std::shared_ptr<Communicator> bootstrap,
                                   c10::Device device, const std::string& name) {
  const auto joined = join(backend, *bootstrap, device.index(), name);
  if (!joined) return bootstrap;
  return std::make_shared<NcclCommunicator>(backend, std::move(bootstrap), device, *joined, name);
}

// A fresh id for each part, rather than ncclCommSplit: parts start as whole communicators do, with
// the same time-outs and the same agreement on failures, on any NCCL.
std::shared_ptr<Communicator> NcclCommunicator::do_split(int color, int key) {
  auto part = bootstrap_->split(color, key);
  if (part == nullptr) return nullptr;
  return make(backend_, std::move(part), device_, name() + "/split(" + std::to_string(color) + ")");
}

}  // namespace

std::shared_ptr<Communicator> make_communicator(const Backend& backend,
                                                const std::shared_ptr<Communicator>& bootstrap,
                                                c10::Device device) {
  TORCH_CHECK(bootstrap != nullptr, "nccl_communicator: the bootstrap communicator is null");
  return make(backend, bootstrap->split(0, bootstrap->rank()), device, bootstrap->name() + "/nccl");
}

}  // namespace syncnorm::nccl

namespace syncnorm {

std::shared_ptr<Communicator> nccl_communicator(const std::shared_ptr<Communicator>& bootstrap,
                                                c10::Device device) {
  TORCH_CHECK(device.is_cuda(), "nccl_communicator: needs a CUDA device, got ", device);
  const auto& backend = nccl::loaded_backend();
  int index = device.index();
  if (!device.has_index() && backend.problem.empty()) backend.cuda.get_device(&index);
  return nccl::make_communicator(backend, bootstrap,
                                 c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)));
}

}  // namespace syncnorm
