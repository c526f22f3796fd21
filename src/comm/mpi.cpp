#include "syncnorm/mpi.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <thread>

#include "comm/board_line.h"
#include "comm/host_stage.h"
#include "comm/mpi_check.h"
#include "comm/mpi_cuda.h"
#include "comm/mpi_limits.h"
#include "comm/mpi_types.h"
#include "comm/reduction.h"
#include "comm/serial_lock.h"
#include "comm/signature.h"
#include "comm/status_board.h"
#include "comm/tagged_payload.h"
#include "comm/timeout.h"
#include "comm/world_errors.h"

namespace syncnorm {
namespace {

// Above this many bytes a blocking call moves data about twice as fast as a nonblocking one (2
// ranks, Open MPI 4.1: 8 MB in 2.9 ms against 5.7 ms); below it the difference is a few
// microseconds.
constexpr int64_t kBlockingBytes = 32 * 1024;

int64_t max_count = INT_MAX;

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm own, int rank, int size, std::string name, bool serialized)
      : Communicator(rank, size, std::move(name)), comm_(own), serialized_(serialized) {
    const SerialLock lock(serialized_);
    check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    uint64_t uid = 0;
    if (rank == 0) uid = std::random_device()() | (uint64_t{std::random_device()()} << 32) | 1;
    check_mpi(MPI_Bcast(&uid, 1, MPI_UINT64_T, 0, comm_), "MPI_Bcast");
    line_.emplace(uid, world_ranks(), rank);
  }

  ~MpiCommunicator() override {
    int finalized = 1;
    MPI_Finalized(&finalized);
    // A request that nobody waits for any more still refers to the communicator.
    if (finalized || pending_) return;
    const SerialLock lock(serialized_);
    MPI_Comm_free(&comm_);
  }

 private:
  void do_all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    const HostStage stage(tensor, reduction_dtype(tensor.scalar_type()));
    const InFlight in_flight({stage.host()});
    const auto type = mpi_datatype(stage.host().scalar_type());
    const auto width = static_cast<int64_t>(stage.host().element_size());
    auto* data = static_cast<char*>(stage.host().data_ptr());
    in_chunks(stage.host().numel(), [&](int64_t start, int count) {
      void* at = data + start * width;
      move(
          count * width,
          [&](MPI_Request* r) {
            return MPI_Iallreduce(MPI_IN_PLACE, at, count, type, mpi_op(op), comm_, r);
          },
          [&] { return MPI_Allreduce(MPI_IN_PLACE, at, count, type, mpi_op(op), comm_); });
    });
    stage.copy_back();
  }

  /// Whether MPI gets the device memory of a CUDA tensor that moves `bytes` itself, in one blocking
  /// call: Open MPI's nonblocking collectives take none, and its reductions stage it themselves.
  bool goes_directly(const at::Tensor& tensor, int64_t bytes) const {
    return tensor.is_cuda() && !serialized_ && bytes > kBlockingBytes && bytes <= max_count &&
           mpi_takes_device_memory();
  }

  void do_broadcast(const at::Tensor& tensor, int root) override {
    if (goes_directly(tensor, static_cast<int64_t>(tensor.nbytes()))) {
      const InFlight in_flight({tensor});
      wait_for_stream(tensor);
      return broadcast_bytes(tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes()), root);
    }
    const HostStage stage(tensor, tensor.scalar_type());
    const InFlight in_flight({stage.host()});
    broadcast_bytes(stage.host().data_ptr(), static_cast<int64_t>(stage.host().nbytes()), root);
    stage.copy_back();
  }

  void broadcast_bytes(void* data, int64_t bytes, int root) {
    in_chunks(bytes, [&](int64_t start, int count) {
      void* at = static_cast<char*>(data) + start;
      move(
          count, [&](MPI_Request* r) { return MPI_Ibcast(at, count, MPI_BYTE, root, comm_, r); },
          [&] { return MPI_Bcast(at, count, MPI_BYTE, root, comm_); });
    });
  }

  at::Tensor do_all_gather(const at::Tensor& shard, at::IntArrayRef sizes) override {
    auto shape = shard.sizes().vec();
    shape[0] = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    if (goes_directly(shard, c10::multiply_integers(shape) * int64_t(shard.element_size()))) {
      const auto all = at::empty(shape, shard.options());
      const InFlight in_flight({shard, all});
      wait_for_stream(shard);
      gather_rows(shard, sizes, all);
      return all;
    }
    const HostStage stage(shard, shard.scalar_type());
    const auto all = stage.empty(shape);
    const InFlight in_flight({stage.host(), all});
    gather_rows(stage.host(), sizes, all);
    return stage.deliver(all);
  }

  void gather_rows(const at::Tensor& shard, at::IntArrayRef sizes, const at::Tensor& all) {
    int64_t row = static_cast<int64_t>(all.element_size());
    for (const int64_t extent : all.sizes().slice(1)) row *= extent;
    auto* data = static_cast<char*>(all.data_ptr());
    if (static_cast<int64_t>(all.nbytes()) >
        max_count) {  // displacements of the one call would not fit an int
      int64_t start = 0;
      for (int r = 0; r < size(); start += sizes[r++] * row) {
        if (r == rank() && shard.nbytes() > 0)
          std::memcpy(data + start, shard.const_data_ptr(), shard.nbytes());
        broadcast_bytes(data + start, sizes[r] * row, r);
      }
      return;
    }
    const auto layout = at::empty({2, size()}, at::kInt);
    const InFlight in_flight({layout});
    int* counts = layout.data_ptr<int>();
    int* displacements = counts + size();
    int offset = 0;
    for (int r = 0; r < size(); ++r) {
      counts[r] = static_cast<int>(sizes[r] * row);
      displacements[r] = offset;
      offset += counts[r];
    }
    const void* mine = shard.const_data_ptr();
    move(
        offset,
        [&](MPI_Request* r) {
          return MPI_Iallgatherv(mine, counts[rank()], MPI_BYTE, data, counts, displacements,
                                 MPI_BYTE, comm_, r);
        },
        [&] {
          return MPI_Allgatherv(mine, counts[rank()], MPI_BYTE, data, counts, displacements,
                                MPI_BYTE, comm_);
        });
  }

  at::Tensor do_reduce_scatter(const at::Tensor& tensor, at::IntArrayRef sizes) override {
    if (tensor.numel() > max_count) {
      const auto whole = tensor.clone();
      do_all_reduce(whole, ReduceOp::sum);
      const auto start = std::accumulate(sizes.begin(), sizes.begin() + rank(), int64_t{0});
      return whole.narrow(0, start, sizes[rank()]).clone();
    }
    const HostStage stage(tensor, reduction_dtype(tensor.scalar_type()));
    const auto& input = stage.host();
    auto shape = tensor.sizes().vec();
    const int64_t row = tensor.numel() / std::max<int64_t>(shape[0], 1);
    const auto counts = (at::tensor(sizes, at::kLong) * row).to(at::kInt);
    shape[0] = sizes[rank()];
    const auto output = stage.empty(shape);
    const auto type = mpi_datatype(input.scalar_type());
    const InFlight in_flight({input, output, counts});
    const void* from = input.const_data_ptr();
    void* to = output.data_ptr();
    move(
        static_cast<int64_t>(input.nbytes()),
        [&](MPI_Request* r) {
          return MPI_Ireduce_scatter(from, to, counts.const_data_ptr<int>(), type, MPI_SUM, comm_,
                                     r);
        },
        [&] {
          return MPI_Reduce_scatter(from, to, counts.const_data_ptr<int>(), type, MPI_SUM, comm_);
        });
    return stage.deliver(output);
  }

  void do_barrier() override {
    start_and_wait([&](MPI_Request* r) { return MPI_Ibarrier(comm_, r); });
  }

  std::shared_ptr<Communicator> do_split(int color, int key) override {
    do_barrier();  // with its time-out; MPI_Comm_split has none
    MPI_Comm child = MPI_COMM_NULL;
    int child_rank = 0;
    int child_size = 0;
    {
      const SerialLock lock(serialized_);
      check_mpi(MPI_Comm_split(comm_, color < 0 ? MPI_UNDEFINED : color, key, &child),
                "MPI_Comm_split");
      if (child == MPI_COMM_NULL) return nullptr;
      MPI_Comm_rank(child, &child_rank);
      MPI_Comm_size(child, &child_size);
    }
    return std::make_shared<MpiCommunicator>(child, child_rank, child_size,
                                             name() + "/split(" + std::to_string(color) + ")",
                                             serialized_);
  }

  bool gather_diagnostics(const at::Tensor& mine, at::Tensor& all, double seconds) override {
    auto shape = mine.sizes().vec();
    shape[0] = size();
    all = at::empty(shape, mine.options());
    InFlight in_flight({mine, all});
    const auto count = static_cast<int>(mine.nbytes());
    MPI_Request request = MPI_REQUEST_NULL;
    {
      const SerialLock lock(serialized_);
      check_mpi(MPI_Iallgather(mine.const_data_ptr(), count, MPI_BYTE, all.data_ptr(), count,
                               MPI_BYTE, comm_, &request),
                "MPI_Iallgather");
    }
    if (finish(request, seconds, /*watch_peers=*/false)) return true;
    in_flight.give_up();
    abandon();
    return false;
  }

  /// Splits `count` elements into pieces that an int can count; calls `body` at least once, so that
  /// empty tensors meet too.
  template <typename F>
  void in_chunks(int64_t count, F&& body) {
    int64_t start = 0;
    do {
      const auto piece = static_cast<int>(std::min(count - start, max_count));
      body(start, piece);
      start += piece;
    } while (start < count);
  }

  /// Ranks meet first, unless the payload itself will tell them that they belong together. Then
  /// small payloads go by a nonblocking call that this thread polls, so that it can time out. Large
  /// ones meet in any case, with the same time-out, and then block, which is faster.
  template <typename Start, typename Block>
  void move(int64_t bytes, Start&& start, Block&& block) {
    const bool polled = bytes <= kBlockingBytes || serialized_;
    if (!polled || !TaggedPayload::active()) meet(bytes);
    if (polled) return start_and_wait(start);
    const auto entered = enter();
    const ReturnWorldErrors guard;
    check_transport(block());
  }

  /// All ranks are here for the same operation of the same module on equally many bytes, or every
  /// rank raises: a mismatch could hang a blocking call, or add up what does not belong together.
  /// The largest value and the largest negative pin both ends of each word.
  void meet(int64_t bytes) {
    const auto size_word = static_cast<double>(bytes);
    const double kind_word = Signature()
                                 .add("operation", operation().kind)
                                 .add("module", operation().module)
                                 .add("sequence", operation().sequence)
                                 .tag();
    const auto buffer = at::tensor({size_word, -size_word, kind_word, -kind_word}, at::kDouble);
    const InFlight in_flight({buffer});
    auto* words = buffer.data_ptr<double>();
    start_and_wait([&](MPI_Request* r) {
      return MPI_Iallreduce(MPI_IN_PLACE, words, 4, MPI_DOUBLE, MPI_MAX, comm_, r);
    });
    if (words[2] != kind_word || words[3] != -kind_word)
      throw TransportError(
          describe_operation() +
          ": another rank is in a different operation or module. SYNCNORM_CHECK=full names it");
    if (words[0] != size_word || words[1] != -size_word)
      throw TransportError(
          describe_operation() + ": the ranks brought buffers of different sizes, " +
          std::to_string(int64_t(-words[1])) + " to " + std::to_string(int64_t(words[0])) +
          " bytes, this rank " + std::to_string(bytes) + ". SYNCNORM_CHECK=full names the ranks");
  }

  BoardLine::Entered enter() const {
    return BoardLine::Entered(*line_, operation().sequence, describe_operation());
  }

  template <typename Start>
  void start_and_wait(Start&& start) {
    const auto entered = enter();
    MPI_Request request = MPI_REQUEST_NULL;
    {
      const SerialLock lock(serialized_);
      check_transport(start(&request));
    }
    if (finish(request, timeout_seconds(), /*watch_peers=*/true)) return;
    pending_ = true;
    const auto failed = line_->peers_in(StatusBoard::Fate::failed, operation().sequence);
    if (!failed.empty()) throw TransportError(describe_operation() + ": it failed on " + failed);
    abandon();
    throw CommunicationError(timeout_report());
  }

  void abandon() {
    pending_ = true;
    note_abandoned_operation();
  }

  /// Polls until done; false after `seconds`, or, where peers are watched, once it is known that
  /// one has failed in it or has ended without it.
  bool finish(MPI_Request& request, double seconds, bool watch_peers) {
    using Clock = std::chrono::steady_clock;
    constexpr int kSpins = 200;  // tens of microseconds: then let other ranks on this core run
    const auto start = Clock::now();
    auto next_look = start + std::chrono::seconds(1);
    for (int64_t polls = 0;; ++polls) {
      int done = 0;
      {
        const SerialLock lock(serialized_);
        const ReturnWorldErrors guard;
        check_transport(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
      }
      if (done) return true;
      if (polls < kSpins) continue;
      std::this_thread::yield();
      if (polls % 64 != 0) continue;
      const auto now = Clock::now();
      if (std::chrono::duration<double>(now - start).count() > seconds) return false;
      if (watch_peers && now > next_look) {
        if (!line_->peers_in(StatusBoard::Fate::failed, operation().sequence).empty() ||
            !line_->peers_in(StatusBoard::Fate::ended, operation().sequence).empty())
          return false;
        next_look = now + std::chrono::seconds(1);
      }
    }
  }

  std::string timeout_report() const {
    const auto sequence = operation().sequence;
    const auto ended = line_->peers_in(StatusBoard::Fate::ended, sequence);
    return describe_operation() + ": " +
           (!ended.empty() ? "a rank has ended without it"
                           : "timed out after " + std::to_string(int64_t(timeout_seconds())) +
                                 " s (SYNCNORM_TIMEOUT) waiting for the other ranks") +
           line_->absentees(sequence);
  }

  void announce_failure() override { line_->fail(operation().sequence); }

  void check_transport(int code) {
    if (code == MPI_SUCCESS) return;
    announce_failure();
    std::string hint;
    int error_class = MPI_SUCCESS;
    MPI_Error_class(code, &error_class);
    if (error_class == MPI_ERR_TRUNCATE)
      hint = " (the ranks brought buffers of different sizes; SYNCNORM_CHECK=full names them)";
    throw TransportError(describe_operation() + ": " + mpi_error_text(code) + hint);
  }

  std::vector<int> world_ranks() const {
    MPI_Group group = MPI_GROUP_NULL;
    MPI_Group world = MPI_GROUP_NULL;
    check_mpi(MPI_Comm_group(comm_, &group), "MPI_Comm_group");
    check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
    std::vector<int> ranks(size());
    std::vector<int> in_world(size());
    std::iota(ranks.begin(), ranks.end(), 0);
    check_mpi(MPI_Group_translate_ranks(group, size(), ranks.data(), world, in_world.data()),
              "MPI_Group_translate_ranks");
    MPI_Group_free(&group);
    MPI_Group_free(&world);
    return in_world;
  }

  MPI_Comm comm_;
  bool serialized_;
  std::optional<BoardLine> line_;
  bool pending_ = false;  // a request was left behind
};

std::shared_ptr<Communicator> make(MPI_Comm comm, std::string name) {
  const bool serialized = mpi_is_serialized();
  ReturnWorldErrors::install();
  TORCH_CHECK(comm != MPI_COMM_NULL, "mpi_communicator: got MPI_COMM_NULL");
  int inter = 0;
  check_mpi(MPI_Comm_test_inter(comm, &inter), "MPI_Comm_test_inter");
  TORCH_CHECK(!inter, "mpi_communicator: needs an intracommunicator");
  MPI_Comm own = MPI_COMM_NULL;
  int rank = 0;
  int size = 0;
  {
    const SerialLock lock(serialized);
    check_mpi(MPI_Comm_dup(comm, &own), "MPI_Comm_dup");
    check_mpi(MPI_Comm_rank(own, &rank), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(own, &size), "MPI_Comm_size");
  }
  return std::make_shared<MpiCommunicator>(own, rank, size, std::move(name), serialized);
}

}  // namespace

int64_t set_max_count(int64_t count) {
  return std::exchange(max_count, std::min<int64_t>(count, INT_MAX));
}

std::shared_ptr<Communicator> mpi_communicator(MPI_Comm comm) {
  return make(comm, comm == MPI_COMM_WORLD ? "world" : "mpi");
}

}  // namespace syncnorm
