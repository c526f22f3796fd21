#pragma once

#include "kernels/cuda/device.cuh"

/// What one block of a pass writes for all: the words in front of the sums, and the centers.
namespace syncnorm::kernels::cuda {

struct FrontShared {
  uint64_t of_warps[kThreads / kWarp];
};

/// A running mean as a center to sum about: zero where it is not finite.
__device__ inline double center_of(const Values& from, int64_t slot) {
  const double value = value_or(from, slot, 0);
  return isfinite(value) ? value : 0;
}

/// Spreads every bit over all.
__device__ inline uint64_t mixed(uint64_t bits) {
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
  return bits ^ bits >> 31;
}

/// The sum over the block in its first thread.
__device__ inline uint64_t sum_of_block(uint64_t sum, FrontShared& shared) {
  for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (this_thread() % kWarp == 0) shared.of_warps[this_thread() / kWarp] = sum;
  __syncthreads();
  sum = 0;
  if (this_thread() == 0)
    for (const uint64_t of_warp : shared.of_warps) sum += of_warp;
  return sum;
}

/// By one block. Each center's bits are mixed with its place, so that the sum knows the order.
__device__ inline void write_front(const Header& header, const Values& center_from, double* center,
                                   int64_t slots, FrontShared& shared) {
  if (header.to != nullptr && this_thread() < header.words)
    header.to[this_thread()] = header.values[this_thread()];
  uint64_t hash = 0;
  for (int64_t slot = this_thread(); slot < slots; slot += kThreads) {
    const double value = center_of(center_from, slot);
    if (center_from.data != nullptr && center != nullptr) center[slot] = value;
    const auto bits = static_cast<uint64_t>(__double_as_longlong(value == 0 ? 0. : value));
    hash += mixed(bits + static_cast<uint64_t>(slot + 1) * 0x9e3779b97f4a7c15u);
  }
  if (header.center_hash == nullptr) return;
  hash = sum_of_block(hash, shared);
  if (this_thread() != 0) return;
  const auto word = static_cast<double>(mixed(hash) & 0xffff);
  header.center_hash[0] = word;
  header.center_hash[1] = word * word;
}

}  // namespace syncnorm::kernels::cuda
