#include "comm/nccl/join.h"

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <thread>

#include "comm/fnv1a.h"
#include "syncnorm/error.h"

namespace syncnorm::nccl {
namespace {

constexpr size_t kText = 256;

/// What each rank tells the others before NCCL is asked for anything.
struct Introduction {
  uint64_t host = 0;
  int32_t world_rank = -1;
  int32_t version = 0;
  std::array<char, 32> gpu{};
  std::array<char, kText> problem{};
};

/// How each rank fared.
struct Outcome {
  std::array<char, kText> problem{};
};

/// What rank 0 hands out.
struct Invitation {
  ncclUniqueId id{};
  std::array<char, kText> problem{};
};

template <size_t N>
void put(const std::string& text, std::array<char, N>& room) {
  text.copy(room.data(), N - 1);
}

template <typename T>
at::Tensor bytes_of(const T& value) {
  auto bytes = at::empty({1, static_cast<int64_t>(sizeof(T))}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &value, sizeof(T));
  return bytes;
}

template <typename T>
std::vector<T> gather(Communicator& comm, const T& mine) {
  const std::vector<int64_t> ones(comm.size(), 1);
  const auto all = comm.all_gather(bytes_of(mine), ones);
  std::vector<T> values(comm.size());
  std::memcpy(values.data(), all.const_data_ptr(), sizeof(T) * values.size());
  return values;
}

/// Equal for processes that see the same GPUs: containers have names of their own, but their
/// host's boot id.
uint64_t host_hash() {
  std::string identity;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> identity;
  if (identity.empty()) {
    std::array<char, 256> name{};
    gethostname(name.data(), name.size() - 1);
    identity = name.data();
  }
  return fnv1a(identity);
}

int world_rank() {
  int initialized = 0;
  int finalized = 0;
  int rank = -1;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized && !finalized) MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

Introduction introduce(const Backend& backend, int device) {
  Introduction mine;
  mine.host = host_hash();
  mine.world_rank = world_rank();
  put(backend.problem, mine.problem);
  if (!backend.problem.empty()) return mine;
  const auto error =
      backend.cuda.pci_bus_id(mine.gpu.data(), static_cast<int>(mine.gpu.size()), device);
  if (error != cudaSuccess)
    put("CUDA device " + std::to_string(device) + ": " + backend.cuda.error_string(error),
        mine.problem);
  int version = 0;
  if (backend.nccl.get_version(&version) == ncclSuccess) mine.version = version;
  return mine;
}

[[noreturn]] void raise(const std::string& name, const Communicator& comm, const std::string& why) {
  throw CommunicationError("nccl_communicator " + name + ", rank " + std::to_string(comm.rank()) +
                           " of " + std::to_string(comm.size()) + ": " + why);
}

/// Raises, on every rank alike, where any rank has a problem.
template <typename T>
void check(const std::string& name, const Communicator& comm, const std::vector<T>& ranks) {
  std::string text;
  for (size_t r = 0; r < ranks.size(); ++r)
    if (ranks[r].problem[0] != '\0')
      text +=
          (text.empty() ? "rank " : "; rank ") + std::to_string(r) + ": " + ranks[r].problem.data();
  if (!text.empty()) raise(name, comm, text);
}

void check_versions(const std::string& name, const Communicator& comm,
                    const std::vector<Introduction>& ranks) {
  for (size_t r = 1; r < ranks.size(); ++r)
    if (ranks[r].version != ranks[0].version)
      raise(name, comm,
            "the ranks have different versions of NCCL: rank 0 " +
                std::to_string(ranks[0].version) + ", rank " + std::to_string(r) + " " +
                std::to_string(ranks[r].version));
}

/// "ranks 0 and 2 share the GPU 0000:65:00.0", or "".
std::string shared_gpu(const std::vector<Introduction>& ranks) {
  for (size_t a = 0; a < ranks.size(); ++a)
    for (size_t b = a + 1; b < ranks.size(); ++b)
      if (ranks[a].host == ranks[b].host && ranks[a].gpu == ranks[b].gpu)
        return "ranks " + std::to_string(a) + " and " + std::to_string(b) + " share the GPU " +
               ranks[a].gpu.data();
  return "";
}

ncclUniqueId receive_id(const Backend& backend, Communicator& bootstrap, const std::string& name) {
  Invitation invitation;
  if (bootstrap.rank() == 0) {
    const auto result = backend.nccl.unique_id(&invitation.id);
    if (result != ncclSuccess)
      put(std::string("ncclGetUniqueId: ") + backend.nccl.error_string(result), invitation.problem);
  }
  const auto bytes = bytes_of(invitation);
  bootstrap.broadcast(bytes, 0);
  std::memcpy(&invitation, bytes.const_data_ptr(), sizeof invitation);
  check(name, bootstrap, std::vector<Invitation>{invitation});
  return invitation.id;
}

/// Starts NCCL's own meeting and waits for its end; what went wrong, or "". A rank that fails at
/// once has to be found waiting by those that wait in vain for it, hence half the time.
std::string meet(const Backend& backend, Communicator& bootstrap, int device,
                 const ncclUniqueId& id, ncclComm_t* comm) {
  using Clock = std::chrono::steady_clock;
  const CurrentDevice current(backend.cuda, device);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const std::chrono::duration<double> limit(backend.timeout / 2);
  const auto deadline = Clock::now() + limit;
  auto result = backend.nccl.init_rank(comm, bootstrap.size(), id, bootstrap.rank(), &config);
  while (result == ncclInProgress && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    ncclResult_t state = ncclInProgress;
    const auto call = backend.nccl.async_error(*comm, &state);
    result = call == ncclSuccess ? state : call;
  }
  if (result == ncclSuccess) return "";
  if (result == ncclInProgress) {
    std::array<char, 128> text{};
    std::snprintf(text.data(), text.size(),
                  "the ranks did not come together in NCCL in %g s (half of SYNCNORM_TIMEOUT)",
                  limit.count());
    return text.data();
  }
  const char* detail = *comm == nullptr ? nullptr : backend.nccl.last_error(*comm);
  return std::string("NCCL reports ") + backend.nccl.error_string(result) +
         (detail == nullptr || *detail == '\0' ? "" : std::string(" (") + detail + ")");
}

}  // namespace

std::optional<Joined> join(const Backend& backend, Communicator& bootstrap, int device,
                           const std::string& name) {
  const auto ranks = gather(bootstrap, introduce(backend, device));
  check(name, bootstrap, ranks);
  check_versions(name, bootstrap, ranks);
  if (const auto shared = shared_gpu(ranks); !shared.empty()) {
    if (bootstrap.rank() == 0)
      std::fprintf(stderr,
                   "syncnorm: %s, which NCCL does not support: %s works without NCCL, through the "
                   "host\n",
                   shared.c_str(), name.c_str());
    return std::nullopt;
  }
  Joined joined;
  const auto id = receive_id(backend, bootstrap, name);
  joined.uid = fnv1a({id.internal, sizeof id.internal}) | 1;
  for (const auto& rank : ranks) joined.world_ranks.push_back(rank.world_rank);
  Outcome outcome;
  put(meet(backend, bootstrap, device, id, &joined.comm), outcome.problem);
  try {
    check(name, bootstrap, gather(bootstrap, outcome));
  } catch (const CommunicationError&) {
    if (joined.comm != nullptr) backend.nccl.abort(joined.comm);
    throw;
  }
  return joined;
}

}  // namespace syncnorm::nccl
