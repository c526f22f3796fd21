#include <cuda_runtime.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
constexpr size_t kSharedMemory = 48 * 1024;
alignas(16) unsigned char cuda_shared_memory[kSharedMemory];

namespace cuda_emulation {
namespace {

constexpr int kWarp = 32;
constexpr size_t kStack = 256 * 1024;  // sanitizers make frames large

enum class State { ready, waits_for_block, waits_for_warp, returned };

struct Fiber {
  ucontext_t context = {};
  void* stack = nullptr;
  void* fake_stack = nullptr;
  uint3 thread = {};
  int warp = 0, lane = 0;
  State state = State::ready;
  Site site = {};
  uint64_t generation = 0;  ///< of what it waits for
};

/// Values that a warp exchanges. Those of the next exchange do not overwrite the last: a lane may
/// go on before others have read.
struct Warp {
  uint64_t values[2][kWarp] = {};
  unsigned mask = 0, arrived = 0;
  Site site = {};
  uint64_t generation = 0;
};

Order order = Order::forward;
std::mt19937 random_bits(1);  // NOLINT(bugprone-random-generator-seed): the same in every run
int64_t launched = 0;

const void* kernel = nullptr;
const std::function<void()>* body = nullptr;
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Warp> warps;
Fiber* current = nullptr;
ucontext_t scheduler;
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_size = 0;
size_t arrived = 0;
uint64_t generation = 0;
Site barrier = {};

std::string describe(const uint3& at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) +
         ")";
}

std::string describe(const Site& site) {
  return std::string(site.file) + ":" + std::to_string(site.line);
}

[[noreturn]] void fail(const Fiber& fiber, const std::string& what) {
  char name[512] = "";
  // It looks before the address, which it takes for one to return to.
  const auto inside = reinterpret_cast<uintptr_t>(kernel) + 1;
  __sanitizer_symbolize_pc(reinterpret_cast<void*>(inside), "%f", name, sizeof name);
  std::fprintf(stderr, "cuda_emulation: kernel %s, block %s, thread %s: %s\n", name,
               describe(blockIdx).c_str(), describe(fiber.thread).c_str(), what.c_str());
  std::abort();
}

void to_scheduler(void** fake_stack) {
  auto* fiber = current;
  __sanitizer_start_switch_fiber(fake_stack, scheduler_stack, scheduler_stack_size);
  swapcontext(&fiber->context, &scheduler);
  __sanitizer_finish_switch_fiber(fiber->fake_stack, &scheduler_stack, &scheduler_stack_size);
}

/// A fiber runs the same thread of every block.
void run_fiber() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
  for (;;) {
    (*body)();
    current->state = State::returned;
    to_scheduler(&current->fake_stack);
  }
}

void make_fibers(size_t count) {
  while (fibers.size() < count) {
    auto fiber = std::make_unique<Fiber>();
    fiber->stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fiber->stack == MAP_FAILED) fail(*fiber, "no memory for its stack");
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack;
    fiber->context.uc_stack.ss_size = kStack;
    makecontext(&fiber->context, run_fiber, 0);
    // Else AddressSanitizer would forget, at every switch, what it knows of this stack.
    fiber->context.uc_stack.ss_size = 0;
    fibers.push_back(std::move(fiber));
  }
}

bool can_run(const Fiber& fiber) {
  switch (fiber.state) {
    case State::waits_for_block:
      return fiber.generation != generation;
    case State::waits_for_warp:
      return fiber.generation != warps[fiber.warp].generation;
    case State::returned:
      return false;
    default:
      return true;
  }
}

void resume(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.thread;
  fiber.state = State::ready;
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack, kStack);
  swapcontext(&scheduler, &fiber.context);
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
}

template <typename T>
std::vector<T> ordered(size_t count) {
  std::vector<T> all(count);
  std::iota(all.begin(), all.end(), T{0});
  if (order == Order::backward) std::reverse(all.begin(), all.end());
  if (order == Order::shuffled) std::shuffle(all.begin(), all.end(), random_bits);
  return all;
}

/// Nobody could go on, though not all have returned.
[[noreturn]] void fail_waiting(size_t threads) {
  const Fiber* waiting = nullptr;
  const Fiber* other = nullptr;
  for (size_t t = 0; t < threads; ++t) {
    const auto& fiber = *fibers[t];
    if (fiber.state == State::returned) {
      other = &fiber;
    } else {
      waiting = &fiber;
    }
  }
  for (size_t t = 0; other == nullptr && t < threads; ++t)
    if (fibers[t]->site != waiting->site) other = fibers[t].get();
  std::string what = "waits for ever at " + describe(waiting->site);
  if (other != nullptr)
    what +=
        ", thread " + describe(other->thread) +
        (other->state == State::returned ? " has returned" : " waits at " + describe(other->site));
  fail(*waiting, what);
}

void run_block(unsigned block, size_t threads, size_t shared) {
  blockIdx = {block, 0, 0};
  std::memset(cuda_shared_memory, 0xff, shared);
  warps.assign((threads + kWarp - 1) / kWarp, Warp());
  arrived = 0;
  const auto sequence = ordered<unsigned>(threads);
  for (size_t t = 0; t < threads; ++t) {
    auto& fiber = *fibers[t];
    fiber.thread = {static_cast<unsigned>(t), 0, 0};
    fiber.warp = static_cast<int>(t) / kWarp;
    fiber.lane = static_cast<int>(t) % kWarp;
    fiber.state = State::ready;
  }
  for (size_t returned = 0; returned < threads;) {
    bool moved = false;
    for (const unsigned t : sequence) {
      if (!can_run(*fibers[t])) continue;
      moved = true;
      resume(*fibers[t]);
      if (fibers[t]->state == State::returned) ++returned;
    }
    if (!moved) fail_waiting(threads);
  }
}

void wait(State state, uint64_t since, const Site& site) {
  current->state = state;
  current->generation = since;
  current->site = site;
  to_scheduler(&current->fake_stack);
}

}  // namespace

void set_order(Order wanted) { order = wanted; }

int64_t launches() { return launched; }

int lane() { return current->lane; }

cudaError_t run(const cudaLaunchConfig_t& config, const void* function,
                const std::function<void()>& thread) {
  const auto& grid = config.gridDim;
  const auto& block = config.blockDim;
  const auto count = [](const dim3& of) { return uint64_t{of.x} * of.y * of.z; };
  if (count(grid) == 0 || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535 ||
      count(block) == 0 || count(block) > 1024)
    return cudaErrorInvalidConfiguration;
  if (config.dynamicSmemBytes > kSharedMemory) return cudaErrorInvalidValue;
  if (grid.y * grid.z * block.y * block.z != 1) {
    std::fputs("cuda_emulation: only one dimension is emulated\n", stderr);
    std::abort();
  }
  ++launched;
  kernel = function;
  body = &thread;
  gridDim = grid;
  blockDim = block;
  make_fibers(block.x);
  const size_t shared = config.dynamicSmemBytes;
  ASAN_POISON_MEMORY_REGION(cuda_shared_memory + shared, kSharedMemory - shared);
  for (const unsigned b : ordered<unsigned>(grid.x)) run_block(b, block.x, shared);
  ASAN_UNPOISON_MEMORY_REGION(cuda_shared_memory, kSharedMemory);
  return cudaSuccess;
}

void wait_for_block(const Site& site) {
  if (arrived == 0) barrier = site;
  if (barrier != site)
    fail(*current, "is at the barrier at " + describe(site) + ", others at " + describe(barrier));
  if (++arrived < blockDim.x) return wait(State::waits_for_block, generation, site);
  arrived = 0;
  ++generation;
}

uint64_t exchange(unsigned mask, uint64_t bits, int source, const Site& site) {
  auto& warp = warps[current->warp];
  const int lane = current->lane;
  if (warp.arrived == 0) {
    warp.mask = mask;
    warp.site = site;
  }
  if (warp.mask != mask || warp.site != site)
    fail(*current, "shuffles at " + describe(site) + ", others of its warp at " +
                       describe(warp.site) + " or with another mask");
  if ((mask >> lane & 1) == 0 || (mask >> source & 1) == 0)
    fail(*current, "shuffles with a lane that its mask leaves out, at " + describe(site));
  const uint64_t since = warp.generation;
  warp.values[since % 2][lane] = bits;
  warp.arrived |= 1u << lane;
  if (warp.arrived == mask) {
    warp.arrived = 0;
    ++warp.generation;
  } else {
    wait(State::waits_for_warp, since, site);
  }
  return warps[current->warp].values[since % 2][source];
}

}  // namespace cuda_emulation
