#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "syncnorm/error.h"

namespace syncnorm {

enum class ReduceOp { sum, max, min };

/// What a communicator has moved since it was made or `reset_counters()` was called.
struct Counters {
  int64_t all_reduce = 0;
  int64_t all_gather = 0;
  int64_t reduce_scatter = 0;
  int64_t broadcast = 0;
  int64_t barrier = 0;
  int64_t bytes =
      0;  ///< payload this rank handed in (broadcast: on every rank), diagnostics excluded
  int64_t second_exchanges =
      0;  ///< statistics exchanged again because the first sums had lost digits

  int64_t collectives() const {
    return all_reduce + all_gather + reduce_scatter + broadcast + barrier;
  }
};

/// A fixed group of ranks that moves tensors between them.
///
/// Every operation is collective: all ranks of the group call it, in the same order. Operations
/// block until the result is in place; over MPI a rank that waits longer than SYNCNORM_TIMEOUT
/// seconds (default 600) for the others to arrive raises CommunicationError, c10d groups keep their
/// own time-out. Tensors may live on any device; a backend that cannot reach the device stages
/// through the host. Reductions take double, float, half, bfloat16 (both summed in float and
/// rounded once; over NCCL in their own dtype) and integers of 8 to 64 bits; gathers and broadcasts
/// take any dtype.
///
/// Thread safety: one thread at a time for each communicator. Different communicators may be used
/// from different threads at the same time: every backend works on a duplicate of its own.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Reduces `tensor` over all ranks, in place. All ranks pass the same shape and dtype.
  void all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum);

  /// Joins the ranks' `shard`s along dimension 0 in rank order; `sizes[r]` is rank r's size there
  /// (0 is allowed).
  at::Tensor all_gather(const at::Tensor& shard, at::IntArrayRef sizes);

  /// Sums `tensor` over all ranks and returns rows [sum(sizes[:rank]), + sizes[rank]) of dimension
  /// 0.
  at::Tensor reduce_scatter(const at::Tensor& tensor, at::IntArrayRef sizes);

  /// Overwrites `tensor` with rank `root`'s, in place.
  void broadcast(const at::Tensor& tensor, int root);

  void barrier();

  /// Ranks that pass the same `color` form a group, ordered by (key, rank). A negative color joins
  /// none and returns null.
  std::shared_ptr<Communicator> split(int color, int key);

  const Counters& counters() const { return counters_; }
  void reset_counters() { counters_ = Counters(); }
  void count_second_exchange() { ++counters_.second_exchanges; }

  /// Number of collectives started so far; the next one carries this number in error messages and
  /// tags.
  uint64_t sequence() const { return sequence_; }

  /// Where the error messages say they come from: "world", "world/split(1)", ...
  const std::string& name() const { return name_; }

 protected:
  Communicator(int rank, int size, std::string name);

  virtual void do_all_reduce(const at::Tensor& tensor, ReduceOp op) = 0;
  virtual at::Tensor do_all_gather(const at::Tensor& shard, at::IntArrayRef sizes) = 0;
  virtual at::Tensor do_reduce_scatter(const at::Tensor& tensor, at::IntArrayRef sizes) = 0;
  virtual void do_broadcast(const at::Tensor& tensor, int root) = 0;
  virtual void do_barrier() = 0;
  virtual std::shared_ptr<Communicator> do_split(int color, int key) = 0;

  /// "all_reduce #12 of encoder.bn1 on world, rank 2 of 4": the operation in progress, for
  /// messages.
  std::string describe_operation() const;

  /// Same-size tensors of bytes from all ranks, for diagnostics: neither counted nor numbered.
  /// Returns false when the other ranks do not answer within `seconds`.
  virtual bool gather_diagnostics(const at::Tensor& mine, at::Tensor& all, double seconds);

  /// The same through `other`, for a backend that stands on one.
  static bool gather_diagnostics_of(Communicator& other, const at::Tensor& mine, at::Tensor& all,
                                    double seconds) {
    return other.gather_diagnostics(mine, all, seconds);
  }

  /// This rank is about to raise from the current operation: tells ranks that may be stuck in it,
  /// where that is possible.
  virtual void announce_failure() {}

  struct Operation {
    const char* kind = "";
    std::string module;
    uint64_t sequence = 0;
  };
  const Operation& operation() const { return operation_; }

 private:
  template <typename F>
  auto run(const char* kind, const at::Tensor& payload, int64_t detail, F&& body);
  void check_fingerprints(const char* kind, const at::Tensor& payload, int64_t detail);
  friend class StatisticsBuffer;
  [[noreturn]] void raise_disagreement(const std::string& mine);

  int rank_;
  int size_;
  std::string name_;
  uint64_t sequence_ = 0;
  Counters counters_;
  Operation operation_;
  std::string details_;  // what StatisticsBuffer adds to the next fingerprint
  std::string failure_;
};

/// Names the module on whose behalf this thread communicates, for error messages and tags, while it
/// lives.
class ModuleScope {
 public:
  explicit ModuleScope(std::string name);
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

  /// The innermost living scope's name on this thread, or "" where there is none.
  static const std::string& current();

 private:
  std::string previous_;
};

/// Waits for the norms that are queued on a GPU over `comm` and raises what they found. On a GPU a
/// forward or backward returns before its collective has run: where the ranks disagree, or a
/// channel has one value in all, its outputs are NaN and the error is raised by a later norm on
/// `comm`, or here. Call it where results leave the loop, at the end of an epoch say. Not
/// collective. Replays of a CUDA graph are not waited for: synchronise the device first.
void check_device_results(const std::shared_ptr<Communicator>& comm);

/// The group of this process alone. Collectives return at once but are counted, so that counts can
/// be compared.
std::shared_ptr<Communicator> self_communicator();

}  // namespace syncnorm
