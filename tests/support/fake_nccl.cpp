#include "support/fake_nccl.h"

#include <ATen/ATen.h>
#include <mpi.h>

#include <chrono>
#include <climits>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>

using syncnorm::testing::FakeNccl;

// The types that NCCL and CUDA leave open.
struct ncclComm {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0;
  int size = 1;
  std::atomic<int> state{ncclSuccess};
  std::atomic<int> polls{0};
  std::atomic<bool> ended{false};
};
struct CUevent_st {
  std::atomic<bool> hangs{false};
};

namespace {

FakeNccl* fake = nullptr;
MPI_Comm meeting_place = MPI_COMM_NULL;
int meetings = 0;

// Work between ncclGroupStart and ncclGroupEnd.
int group_depth = 0;
std::vector<std::function<ncclResult_t()>> group;
ncclComm* group_comm = nullptr;

cudaStream_t the_stream() { return reinterpret_cast<cudaStream_t>(0x50); }

struct Id {
  int root;
  int tag;
};

/// All `size` ranks that hold the id find each other through rank 0.
MPI_Comm meet(const Id& id, int rank, int size) {
  std::vector<int> members(size);
  int me = 0;
  MPI_Comm_rank(meeting_place, &me);
  if (rank == 0) {
    members[0] = me;
    for (int i = 1; i < size; ++i) {
      int theirs[2];
      MPI_Recv(theirs, 2, MPI_INT, MPI_ANY_SOURCE, id.tag, meeting_place, MPI_STATUS_IGNORE);
      members[theirs[0]] = theirs[1];
    }
    for (int i = 1; i < size; ++i)
      MPI_Send(members.data(), size, MPI_INT, members[i], id.tag, meeting_place);
  } else {
    const int mine[2] = {rank, me};
    MPI_Send(mine, 2, MPI_INT, id.root, id.tag, meeting_place);
    MPI_Recv(members.data(), size, MPI_INT, id.root, id.tag, meeting_place, MPI_STATUS_IGNORE);
  }
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group part = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_group(meeting_place, &all);
  MPI_Group_incl(all, size, members.data(), &part);
  MPI_Comm_create_group(meeting_place, part, id.tag, &comm);
  MPI_Group_free(&all);
  MPI_Group_free(&part);
  return comm;
}

at::ScalarType dtype_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
      return at::kChar;
    case ncclUint8:
      return at::kByte;
    case ncclInt32:
      return at::kInt;
    case ncclInt64:
      return at::kLong;
    case ncclFloat16:
      return at::kHalf;
    case ncclBfloat16:
      return at::kBFloat16;
    case ncclFloat32:
      return at::kFloat;
    default:
      return at::kDouble;
  }
}

std::string text_of(ncclDataType_t type, size_t count) {
  return std::string(c10::toString(dtype_of(type))) + " x" + std::to_string(count);
}

/// [count], the ranks' values reduced.
at::Tensor reduced(ncclComm* comm, const void* send, size_t count, ncclDataType_t type,
                   ncclRedOp_t op) {
  const auto dtype = dtype_of(type);
  auto all = at::empty({comm->size, static_cast<int64_t>(count)}, dtype);
  const auto bytes = static_cast<int>(count * all.element_size());
  MPI_Allgather(send, bytes, MPI_BYTE, all.mutable_data_ptr(), bytes, MPI_BYTE, comm->comm);
  if (op == ncclMax) return std::get<0>(all.max(0)).contiguous();
  if (op == ncclMin) return std::get<0>(all.min(0)).contiguous();
  return all.sum(0, /*keepdim=*/false, dtype).contiguous();
}

void copy_to(void* to, const at::Tensor& from) {
  if (from.nbytes() > 0) std::memcpy(to, from.const_data_ptr(), from.nbytes());
}

ncclResult_t perform(ncclComm* comm, const std::vector<std::function<ncclResult_t()>>& work) {
  if (fake->call_fails) return ncclInternalError;
  if (fake->start_hangs) {
    comm->polls = INT_MAX;
    return ncclInProgress;
  }
  for (const auto& item : work)
    if (!fake->device_hangs) item();
  comm->polls = fake->polls.load();
  return comm->polls > 0 ? ncclInProgress : ncclSuccess;
}

ncclResult_t issue(ncclComm* comm, cudaStream_t stream, std::string text,
                   std::function<ncclResult_t()> work) {
  if (comm->ended || stream != the_stream()) ++fake->misuses;
  fake->note(std::move(text));
  if (group_depth == 0) return perform(comm, {work});
  if (fake->call_fails) return ncclInternalError;
  group_comm = comm;
  group.push_back(std::move(work));
  return ncclSuccess;
}

ncclResult_t init_rank(ncclComm_t* out, int size, ncclUniqueId unique, int rank,
                       ncclConfig_t* config) {
  if (config->blocking != 0) ++fake->misuses;
  auto* comm = new ncclComm();
  *out = comm;
  ++fake->created;
  comm->rank = rank;
  comm->size = size;
  comm->polls = 3;
  if (fake->init_fails) {
    comm->state = ncclSystemError;
  } else if (fake->init_hangs) {
    comm->polls = INT_MAX;
  } else {
    Id id{};
    std::memcpy(&id, unique.internal, sizeof id);
    comm->comm = meet(id, rank, size);
  }
  return ncclInProgress;
}

ncclResult_t unique_id(ncclUniqueId* unique) {
  if (fake->unique_id_fails) return ncclSystemError;
  Id id{0, 1 + meetings++};
  MPI_Comm_rank(meeting_place, &id.root);
  std::memcpy(unique->internal, &id, sizeof id);
  return ncclSuccess;
}

ncclResult_t async_error(ncclComm_t comm, ncclResult_t* state) {
  if (comm->ended) ++fake->misuses;
  *state = static_cast<ncclResult_t>(fake->async_error.load());
  if (*state != ncclSuccess) return ncclSuccess;
  if (comm->polls > 0) {
    if (comm->polls != INT_MAX) --comm->polls;
    *state = ncclInProgress;
  } else {
    *state = static_cast<ncclResult_t>(comm->state.load());
  }
  return ncclSuccess;
}

ncclResult_t end(ncclComm_t comm, std::atomic<int>& count) {
  if (comm->ended.exchange(true)) ++fake->misuses;
  ++count;
  return ncclSuccess;  // the memory stays, so that a later call is noticed
}

ncclResult_t finalize(ncclComm_t comm) {
  if (comm->ended) ++fake->misuses;
  comm->polls = fake->finalize_hangs ? INT_MAX : 2;
  return ncclInProgress;
}

ncclResult_t group_start() {
  ++group_depth;
  fake->note("group_start");
  return ncclSuccess;
}

ncclResult_t group_end() {
  fake->note("group_end");
  if (--group_depth > 0 || group.empty()) return ncclSuccess;
  const auto work = std::exchange(group, {});
  return perform(group_comm, work);
}

ncclResult_t all_reduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, stream, "all_reduce " + text_of(type, count), [=] {
    copy_to(recv, reduced(comm, send, count, type, op));
    return ncclSuccess;
  });
}

ncclResult_t all_gather(const void* send, void* recv, size_t count, ncclDataType_t type,
                        ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, stream, "all_gather " + text_of(type, count), [=] {
    const auto bytes = static_cast<int>(count * c10::elementSize(dtype_of(type)));
    MPI_Allgather(send, bytes, MPI_BYTE, recv, bytes, MPI_BYTE, comm->comm);
    return ncclSuccess;
  });
}

ncclResult_t reduce_scatter(const void* send, void* recv, size_t count, ncclDataType_t type,
                            ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, stream, "reduce_scatter " + text_of(type, count), [=] {
    const auto all = reduced(comm, send, count * comm->size, type, op);
    const auto mine = static_cast<int64_t>(count);
    copy_to(recv, all.narrow(0, comm->rank * mine, mine));
    return ncclSuccess;
  });
}

ncclResult_t broadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                       ncclComm_t comm, cudaStream_t stream) {
  const auto text = "broadcast " + text_of(type, count) + " from " + std::to_string(root);
  return issue(comm, stream, text, [=] {
    const size_t bytes = count * c10::elementSize(dtype_of(type));
    if (comm->rank == root && send != recv) std::memcpy(recv, send, bytes);
    MPI_Bcast(recv, static_cast<int>(bytes), MPI_BYTE, root, comm->comm);
    return ncclSuccess;
  });
}

ncclResult_t reduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                    int root, ncclComm_t comm, cudaStream_t stream) {
  const auto text = "reduce " + text_of(type, count) + " to " + std::to_string(root);
  return issue(comm, stream, text, [=] {
    const auto all = reduced(comm, send, count, type, op);
    if (comm->rank == root) copy_to(recv, all);
    return ncclSuccess;
  });
}

cudaError_t event_query(cudaEvent_t event) {
  if (fake->driver_gone) return cudaErrorCudartUnloading;
  if (fake->event_error != cudaSuccess) return static_cast<cudaError_t>(fake->event_error.load());
  return event->hangs && fake->aborted == 0 && fake->device_hangs ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t synchronize(cudaStream_t) {
  while (fake->device_hangs && fake->aborted == 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return cudaSuccess;
}

cudaError_t event_record(cudaEvent_t event, cudaStream_t stream) {
  if (stream != the_stream()) ++fake->misuses;
  if (fake->stream_full) synchronize(stream);
  event->hangs = fake->device_hangs.load();
  fake->note("event_record");
  return cudaSuccess;
}

syncnorm::nccl::NcclApi nccl_functions() {
  syncnorm::nccl::NcclApi api;
  api.get_version = [](int* version) {
    *version = fake->version;
    return ncclSuccess;
  };
  api.error_string = [](ncclResult_t result) {
    return result == ncclSystemError ? "unhandled system error" : "some other error";
  };
  api.last_error = [](ncclComm_t) { return "the fake's last words"; };
  api.unique_id = unique_id;
  api.init_rank = init_rank;
  api.async_error = async_error;
  api.finalize = finalize;
  api.destroy = [](ncclComm_t comm) { return end(comm, fake->destroyed); };
  api.abort = [](ncclComm_t comm) { return end(comm, fake->aborted); };
  api.group_start = group_start;
  api.group_end = group_end;
  api.all_reduce = all_reduce;
  api.all_gather = all_gather;
  api.reduce_scatter = reduce_scatter;
  api.broadcast = broadcast;
  api.reduce = reduce;
  return api;
}

syncnorm::nccl::CudaApi cuda_functions() {
  syncnorm::nccl::CudaApi api;
  api.error_string = [](cudaError_t) { return "a fake CUDA error"; };
  api.get_device = [](int* device) {
    *device = 0;
    return fake->driver_gone ? cudaErrorCudartUnloading : cudaSuccess;
  };
  api.set_device = [](int) { return cudaSuccess; };
  api.pci_bus_id = [](char* text, int room, int) {
    std::snprintf(text, room, "%s", fake->gpu.c_str());
    return cudaSuccess;
  };
  api.event_create = [](cudaEvent_t* event, unsigned) {
    *event = new CUevent_st();
    ++fake->events_created;
    return cudaSuccess;
  };
  api.event_record = event_record;
  api.event_query = event_query;
  api.event_destroy = [](cudaEvent_t event) {
    delete event;
    ++fake->events_destroyed;
    return cudaSuccess;
  };
  api.is_capturing = [](cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = fake->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
  };
  api.synchronize = synchronize;
  api.exchange_capture_mode = [](cudaStreamCaptureMode* mode) {
    if (*mode != cudaStreamCaptureModeRelaxed) ++fake->misuses;
    return cudaSuccess;
  };
  api.current_stream = [](c10::Device) { return the_stream(); };
  return api;
}

}  // namespace

namespace syncnorm::testing {

std::vector<std::string> FakeNccl::take_calls() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(calls_, {});
}

void FakeNccl::note(std::string call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  calls_.push_back(std::move(call));
}

nccl::Backend FakeNccl::backend(double timeout) const {
  return {nccl_functions(), cuda_functions(), "", timeout};
}

FakeNccl& FakeNccl::renew() {
  if (meeting_place == MPI_COMM_NULL) MPI_Comm_dup(MPI_COMM_WORLD, &meeting_place);
  fake = new FakeNccl();  // an old one stays for the threads that may still look at it
  int rank = 0;
  MPI_Comm_rank(meeting_place, &rank);
  fake->gpu = "0000:0" + std::to_string(rank) + ":00.0";
  return *fake;
}

}  // namespace syncnorm::testing
