#include "syncnorm/sampler.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <utility>

namespace syncnorm {
namespace {

/// A generator that (seed, epoch) decide, also where they are small and close to each other.
std::mt19937_64 generator(uint64_t seed, int64_t epoch) {
  const auto e = static_cast<uint64_t>(epoch);
  std::seed_seq words{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                      static_cast<uint32_t>(e), static_cast<uint32_t>(e >> 32)};
  return std::mt19937_64(words);
}

/// Uniform in [0, bound). std::uniform_int_distribution and std::shuffle may differ between
/// standard libraries, and with them the order between the machines of a job.
uint64_t uniform_below(std::mt19937_64& random, uint64_t bound) {
  const uint64_t fair = std::numeric_limits<uint64_t>::max() / bound * bound;
  uint64_t value = random();
  while (value >= fair) value = random();
  return value % bound;
}

}  // namespace

DistributedBatchSampler::DistributedBatchSampler(int64_t dataset_size, int64_t global_batch,
                                                 int rank, int size, bool shuffle, uint64_t seed,
                                                 bool drop_last)
    : global_batch_(global_batch),
      rank_(rank),
      size_(size),
      shuffle_(shuffle),
      seed_(seed),
      drop_last_(drop_last) {
  TORCH_CHECK(dataset_size >= 0, "DistributedBatchSampler: dataset_size is ", dataset_size,
              ", must not be negative.");
  TORCH_CHECK(global_batch > 0, "DistributedBatchSampler: global_batch is ", global_batch,
              ", must be at least 1.");
  TORCH_CHECK(size > 0 && rank >= 0 && rank < size, "DistributedBatchSampler: rank ", rank, " of ",
              size, " ranks does not exist.");
  order_.resize(static_cast<size_t>(dataset_size));
  set_epoch(0);
}

void DistributedBatchSampler::set_epoch(int64_t epoch) {
  TORCH_CHECK(epoch >= 0, "DistributedBatchSampler: epoch is ", epoch, ", must not be negative.");
  std::iota(order_.begin(), order_.end(), int64_t{0});
  if (!shuffle_) return;
  auto random = generator(seed_, epoch);
  for (size_t left = order_.size(); left > 1; --left) {
    std::swap(order_[left - 1], order_[uniform_below(random, left)]);
  }
}

int64_t DistributedBatchSampler::steps() const {
  const auto samples = static_cast<int64_t>(order_.size());
  return samples / global_batch_ + (!drop_last_ && samples % global_batch_ != 0 ? 1 : 0);
}

DistributedBatchSampler::Batch DistributedBatchSampler::batch(int64_t step) const {
  TORCH_CHECK(step >= 0 && step < steps(), "DistributedBatchSampler: step ", step,
              " of an epoch of ", steps(), " steps does not exist.");
  const int64_t begin = step * global_batch_;
  const int64_t length = std::min(global_batch_, static_cast<int64_t>(order_.size()) - begin);
  const int64_t share = length / size_;
  const int64_t longer = length % size_;
  const int64_t first = begin + rank_ * share + std::min<int64_t>(rank_, longer);
  const int64_t count = share + (rank_ < longer ? 1 : 0);
  Batch result;
  result.indices.assign(order_.begin() + first, order_.begin() + first + count);
  result.global_size = length;
  return result;
}

}  // namespace syncnorm
