#include "autograd/verdicts.h"

#include <algorithm>
#include <chrono>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/statistics_buffer.h"
#include "comm/timeout.h"
#include "kernels/cuda/launch.h"

namespace syncnorm {
namespace {

using kernels::cuda::Verdict;

struct Record {
  std::weak_ptr<Communicator> comm;
  std::string operation, module;
  at::Tensor word;
  bool pinned, kept;

  Verdict verdict() const {
    return static_cast<Verdict>(*static_cast<volatile const int32_t*>(word.data_ptr<int32_t>()));
  }
};

struct State {
  std::mutex mutex;
  std::list<Record> records;
  std::vector<at::Tensor> free_words[2];  // pageable and pinned
};

State& state() {
  static auto* living = new State();  // kernels may still write when static objects are gone
  return *living;
}

at::Tensor take_word(State& of, bool pinned) {
  constexpr int64_t kPage = 1024;
  auto& words = of.free_words[pinned ? 1 : 0];
  if (words.empty()) {
    const auto page = at::empty({kPage}, at::TensorOptions().dtype(at::kInt).pinned_memory(pinned));
    for (int64_t i = 0; i < kPage; ++i) words.push_back(page.narrow(0, i, 1));
  }
  const auto word = words.back();
  words.pop_back();
  *word.data_ptr<int32_t>() = kernels::cuda::kPending;
  return word;
}

[[noreturn]] void raise(const Record& record, Verdict verdict, Communicator& comm) {
  switch (verdict) {
    case kernels::cuda::kSingleValue:
      TORCH_CHECK_VALUE(false, record.module,
                        ": expected more than 1 value per channel over all ranks when training; "
                        "found by ",
                        record.operation, ", whose outputs are NaN");
    case kernels::cuda::kShardsDoNotFit:
      TORCH_CHECK_VALUE(false, record.module,
                        ": the ranks' shards do not add up to the whole length; found by ",
                        record.operation, ", whose outputs are NaN");
    default:
      StatisticsBuffer::fail(
          comm, record.operation + ": the ranks disagree" +
                    (verdict == kernels::cuda::kCentersDiffer
                         ? std::string(": running_mean differs")
                         : ", in module, sequence or settings; SYNCNORM_CHECK=full names what") +
                    ". Found on the device; the outputs are NaN");
  }
}

}  // namespace

at::Tensor Verdicts::open(const std::shared_ptr<Communicator>& comm, std::string operation,
                          std::string module, c10::Device device, bool kept) {
  auto& all = state();
  const std::lock_guard lock(all.mutex);
  const auto word = take_word(all, device.is_cuda());
  all.records.push_back(
      {comm, std::move(operation), std::move(module), word, device.is_cuda(), kept});
  return word;
}

void Verdicts::raise_found(const std::shared_ptr<Communicator>& comm) {
  auto& all = state();
  const std::lock_guard lock(all.mutex);
  for (auto record = all.records.begin(); record != all.records.end();) {
    const auto owner = record->comm.lock();
    const auto verdict = record->verdict();
    const bool settled = verdict == kernels::cuda::kFine || verdict == kernels::cuda::kLostDigits;
    if (verdict == kernels::cuda::kPending || (owner != nullptr && owner != comm) ||
        (settled && record->kept)) {
      ++record;
      continue;
    }
    if (verdict == kernels::cuda::kLostDigits) {
      TORCH_WARN_ONCE(record->operation,
                      ": a mean lies so far from the running mean that the "
                      "variance has fewer digits than its dtype; the running mean catches up");
    }
    const Record done = *record;
    const bool bad = owner != nullptr && !settled;
    if (done.kept && owner != nullptr) {
      ++record;
    } else {
      record = all.records.erase(record);
      if (!done.kept) all.free_words[done.pinned ? 1 : 0].push_back(done.word);
    }
    if (bad) raise(done, verdict, *owner);
  }
}

bool Verdicts::pending(const std::shared_ptr<Communicator>& comm) {
  auto& all = state();
  const std::lock_guard lock(all.mutex);
  return std::any_of(all.records.begin(), all.records.end(), [&](const Record& record) {
    return !record.kept && record.comm.lock() == comm &&
           record.verdict() == kernels::cuda::kPending;
  });
}

void check_device_results(const std::shared_ptr<Communicator>& comm) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_seconds());
  for (;;) {
    Verdicts::raise_found(comm);
    if (!Verdicts::pending(comm)) return;
    if (std::chrono::steady_clock::now() > deadline)
      throw CommunicationError("check_device_results on " + comm->name() + ", rank " +
                               std::to_string(comm->rank()) +
                               ": the device did not come to the end of the norms queued on it in "
                               "SYNCNORM_TIMEOUT seconds");
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace syncnorm
