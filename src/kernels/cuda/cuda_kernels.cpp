#include <map>
#include <mutex>
#include <tuple>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/services.h"
#include "kernels/deferred.h"

namespace syncnorm::kernels {
namespace {

cuda::Dtype dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return cuda::Dtype::float32;
    case at::kDouble:
      return cuda::Dtype::float64;
    case at::kHalf:
      return cuda::Dtype::float16;
    case at::kBFloat16:
      return cuda::Dtype::bfloat16;
    default:
      TORCH_INTERNAL_ASSERT(false, "a norm of ", type);
  }
}

const void* data_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}
void* mutable_data_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}
const double* doubles_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<double>() : nullptr;
}
double* mutable_doubles_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr<double>() : nullptr;
}

cuda::Values values_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.const_data_ptr(), dtype_of(tensor.scalar_type())};
}
cuda::MutableValues mutable_values_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.mutable_data_ptr(), dtype_of(tensor.scalar_type())};
}

at::Tensor dense(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.contiguous() : tensor;
}

/// A layout for the device, and the tensors it points into.
struct DeviceLayout {
  DeviceLayout(const CellLayout& cells, const NormLayout& norm, bool adds) {
    layout.outer = cells.outer;
    layout.cells = cells.cells;
    layout.inner = cells.inner;
    layout.slots = norm.slots;
    layout.affine_rows = norm.affine_rows;
    layout.by_column = norm.by_column;
    layout.centered = norm.centered;
    if (!norm.slot_of_cell.defined()) return;
    slot_of_cell = norm.slot_of_cell.contiguous();
    layout.slot_of_cell = slot_of_cell.const_data_ptr<int64_t>();
    if (!adds) return;
    at::Tensor sorted;
    std::tie(sorted, cells_by_slot) =
        at::sort(slot_of_cell, /*stable=*/std::optional<bool>(true), /*dim=*/0);
    slot_begin = at::searchsorted(sorted, at::arange(norm.slots + 1, sorted.options()));
    layout.cells_by_slot = cells_by_slot.const_data_ptr<int64_t>();
    layout.slot_begin = slot_begin.const_data_ptr<int64_t>();
  }

  DeviceLayout& shared(const at::Tensor& of_cells) {
    share = dense(of_cells);
    layout.share = doubles_of(share);
    return *this;
  }

  cuda::Layout layout;
  at::Tensor slot_of_cell, cells_by_slot, slot_begin, share;
};

cuda::Count count_of(const SlotCount& count) {
  cuda::Count result;
  result.all = count.all;
  result.total = doubles_of(count.total);
  result.slots_of_total = count.slots_of_total;
  result.each = doubles_of(count.each);
  return result;
}

cuda::Header header_of(const Front& front) {
  cuda::Header header;
  TORCH_INTERNAL_ASSERT(front.values.size() <= cuda::Header::kMaxWords);
  header.to = mutable_doubles_of(front.words);
  header.words = static_cast<int>(front.values.size());
  std::copy(front.values.begin(), front.values.end(), header.values);
  header.center_hash = mutable_doubles_of(front.center_hash);
  return header;
}

cuda::Check check_of(const Outcome& outcome) {
  cuda::Check check;
  check.verdict = outcome.verdict.defined() ? outcome.verdict.data_ptr<int32_t>() : nullptr;
  check.tags = doubles_of(outcome.tags);
  check.tag = outcome.tag;
  check.ranks = outcome.ranks;
  check.center_hash = doubles_of(outcome.center_hash);
  check.total_values = outcome.total_values;
  check.refuses_single_value = outcome.refuses_single_value;
  return check;
}

/// The blocks' counters: kept, since they must be zero when a kernel starts and are so again when
/// it ends. One array a stream, since kernels of one stream follow one another; and one a graph,
/// which may be replayed beside anything.
at::Tensor counters_of(c10::Device device, cuda::Stream stream) {
  static std::mutex mutex;
  static auto* kept = new std::map<std::tuple<int, cuda::Stream, uint64_t>, at::Tensor>();
  const std::lock_guard lock(mutex);
  auto& counters = (*kept)[{device.index(), stream, cuda::captured_graph(stream)}];
  if (!counters.defined())
    counters = at::zeros({cuda::kCounters}, at::TensorOptions().dtype(at::kInt).device(device));
  return counters;
}

/// Queues a call on the current stream of the device.
template <typename Call>
void queue(const Call& call, c10::Device device, int64_t workspace_bytes) {
  const cuda::DeviceGuard guard(device);
  cuda::Resources resources;
  resources.stream = cuda::current_stream(device);
  resources.multiprocessors = cuda::multiprocessors(device);
  const auto counters = counters_of(device, resources.stream);
  resources.counters = counters.data_ptr<int32_t>();
  at::Tensor workspace;
  if (workspace_bytes > 0) {
    workspace = at::empty({workspace_bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    resources.workspace = workspace.mutable_data_ptr();
  }
  const auto status = cuda::launch(call, resources);
  TORCH_CHECK(status == 0,
              "syncnorm: a CUDA kernel could not be started: ", cuda::error_text(status));
}

/// A norm's tensors as both passes of the backward read them.
struct DeviceBackward {
  DeviceBackward(const Norm& norm, const at::Tensor& dy, bool adds)
      : layout(norm.input.layout, norm.layout, adds),
        weight(dense(norm.weight)),
        bias(dense(norm.bias)) {
    call.layout = layout.layout;
    call.dtype = dtype_of(dy.scalar_type());
    call.x = norm.input.data.const_data_ptr();
    call.dy = dy.const_data_ptr();
    call.output = data_of(norm.output);
    if (norm.relu) call.gate = norm.output.defined() ? cuda::Gate::output : cuda::Gate::recompute;
    call.weight = values_of(weight);
    call.bias = values_of(bias);
    call.statistics = doubles_of(norm.statistics);
  }

  DeviceLayout layout;
  at::Tensor weight, bias;
  cuda::Backward call;
};

void queue_moments(const at::Tensor& x, const at::Tensor& residual, const NormInput& input,
                   const NormLayout& layout, const at::Tensor& center_from,
                   const at::Tensor& center, const at::Tensor& sums, const Front& front) {
  DeviceLayout device(input.layout, layout, /*adds=*/true);
  cuda::Moments call;
  call.layout = device.shared(layout.share).layout;
  call.dtype = dtype_of(x.scalar_type());
  call.x = x.const_data_ptr();
  call.residual = data_of(residual);
  if (residual.defined()) call.sum = input.data.mutable_data_ptr();
  call.center_from = values_of(center_from);
  call.center = mutable_doubles_of(center);
  call.sums = sums.mutable_data_ptr<double>();
  call.header = header_of(front);
  queue(call, x.device(), cuda::moments_workspace(call, cuda::multiprocessors(x.device())));
}

void queue_apply(const Norm& norm, const cuda::Finish& finish, const at::Tensor& y) {
  const DeviceLayout device(norm.input.layout, norm.layout, /*adds=*/false);
  const auto weight = dense(norm.weight), bias = dense(norm.bias);
  cuda::Apply call;
  call.layout = device.layout;
  call.dtype = dtype_of(y.scalar_type());
  call.x = norm.input.data.const_data_ptr();
  call.residual = data_of(norm.residual);
  call.y = y.mutable_data_ptr();
  call.weight = values_of(weight);
  call.bias = values_of(bias);
  call.relu = norm.relu;
  call.statistics = norm.statistics.data_ptr<double>();
  call.finish = finish;
  queue(call, y.device(), 0);
}

void queue_backward_sums(const Norm& norm, const at::Tensor& dy, const at::Tensor& of_slots,
                         const at::Tensor& of_affine, const at::Tensor& dbias,
                         const at::Tensor& dweight, const Front& front) {
  const DeviceBackward device(norm, dy, /*adds=*/true);
  cuda::BackwardSums call;
  call.of = device.call;
  call.of_slots = of_slots.mutable_data_ptr<double>();
  call.of_affine = mutable_doubles_of(of_affine);
  call.dbias = mutable_values_of(dbias);
  call.dweight = mutable_values_of(dweight);
  call.header = header_of(front);
  queue(call, dy.device(), cuda::backward_sums_workspace(call, cuda::multiprocessors(dy.device())));
}

void queue_backward_apply(const Norm& norm, const at::Tensor& dy, const at::Tensor& sums,
                          const SlotCount& count, const BackwardOutputs& outputs,
                          const Outcome& outcome) {
  DeviceBackward device(norm, dy, /*adds=*/false);
  cuda::BackwardApply call;
  call.of = device.call;
  call.of.layout = device.layout.shared(norm.layout.share).layout;
  call.sums = sums.const_data_ptr<double>();
  call.count = count_of(count);
  call.extra = data_of(outputs.extra);
  call.dx = mutable_data_of(outputs.dx);
  call.dresidual = mutable_data_of(outputs.dresidual);
  call.check = check_of(outcome);
  queue(call, dy.device(), 0);
}

class CudaKernels final : public KernelSet, public DeferredKernels {
 public:
  // Arithmetic of slots, which KernelSet's order has the host wait for in any case.
  at::Tensor center(const at::Tensor& running_mean) const override {
    return reference_kernels().center(running_mean);
  }
  bool finish(const at::Tensor& sums, const NormLayout& layout, const at::Tensor& center,
              const SlotCount& count, const Precision& precision,
              const at::Tensor& statistics) const override {
    return reference_kernels().finish(sums, layout, center, count, precision, statistics);
  }
  void update_running(const at::Tensor& statistics, double count, double momentum,
                      const at::Tensor& running_mean,
                      const at::Tensor& running_var) const override {
    reference_kernels().update_running(statistics, count, momentum, running_mean, running_var);
  }
  at::Tensor affine_gradient(const at::Tensor& of_affine, int64_t row,
                             const at::Tensor& parameter) const override {
    return reference_kernels().affine_gradient(of_affine, row, parameter);
  }

  void moments(const NormInput& x, const NormLayout& layout, const at::Tensor& center,
               const at::Tensor& sums) const override {
    queue_moments(x.data, {}, x, layout, center, {}, sums, {});
  }
  void add_and_moments(const at::Tensor& x, const at::Tensor& residual, const NormInput& sum,
                       const NormLayout& layout, const at::Tensor& center,
                       const at::Tensor& sums) const override {
    queue_moments(x, residual, sum, layout, center, {}, sums, {});
  }
  void apply(const Norm& norm, const at::Tensor& y) const override { queue_apply(norm, {}, y); }
  void backward_sums(const Norm& norm, const at::Tensor& dy, const at::Tensor& of_slots,
                     const at::Tensor& of_affine) const override {
    queue_backward_sums(norm, dy, of_slots, of_affine, {}, {}, {});
  }
  void backward_apply(const Norm& norm, const at::Tensor& dy, const at::Tensor& sums,
                      const SlotCount& count, const BackwardOutputs& outputs) const override {
    queue_backward_apply(norm, dy, sums, count, outputs, {});
  }
  const DeferredKernels* deferred() const override { return this; }

  at::Tensor moments(const at::Tensor& x, const at::Tensor& residual, const NormInput& input,
                     const NormLayout& layout, const at::Tensor& running_mean,
                     const at::Tensor& sums, const Front& front) const override {
    at::Tensor center;
    if (running_mean.defined()) center = at::empty({layout.slots}, sums.options());
    queue_moments(x, residual, input, layout, dense(running_mean), center, sums, front);
    return center;
  }

  void finish_and_apply(const Norm& norm, const Arriving& arriving,
                        const at::Tensor& y) const override {
    cuda::Finish finish;
    finish.sums = doubles_of(arriving.sums);
    finish.center = doubles_of(arriving.center);
    finish.count = count_of(arriving.count);
    finish.eps = arriving.precision.eps;
    finish.floor = arriving.precision.floor;
    finish.ratio = arriving.precision.ratio;
    finish.running_mean = mutable_values_of(arriving.running_mean);
    finish.running_var = mutable_values_of(arriving.running_var);
    finish.momentum = arriving.momentum;
    if (arriving.batches.defined()) finish.batches = arriving.batches.data_ptr<int64_t>();
    finish.check = check_of(arriving.outcome);
    queue_apply(norm, finish, y);
  }

  void backward_sums(const Norm& norm, const at::Tensor& dy, const at::Tensor& of_slots,
                     const at::Tensor& of_affine, const at::Tensor& dbias,
                     const at::Tensor& dweight, const Front& front) const override {
    queue_backward_sums(norm, dy, of_slots, of_affine, dbias, dweight, front);
  }
  void backward_apply(const Norm& norm, const at::Tensor& dy, const at::Tensor& sums,
                      const SlotCount& count, const BackwardOutputs& outputs,
                      const Outcome& outcome) const override {
    queue_backward_apply(norm, dy, sums, count, outputs, outcome);
  }
  bool capturing(c10::Device device) const override {
    const cuda::DeviceGuard guard(device);
    return cuda::captured_graph(cuda::current_stream(device)) != 0;
  }
};

}  // namespace

const KernelSet* cuda_kernels() {
  static const CudaKernels set;
  return &set;
}

}  // namespace syncnorm::kernels
