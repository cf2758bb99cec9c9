// Lets the kernels run on the host: each thread of a block is a std::thread, warps exchange through memory, and two or
// more blocks run at the same time. ThreadSanitizer then sees a missing barrier or fence as the race that it is.
//
// Include it before the .cuh. What it models: __syncthreads and the lock step of a shuffle are barriers; an atomic is
// relaxed, releases what was written before an earlier fence of its thread, and what it read is acquired by a later
// one.
#pragma once

#include <linux/futex.h>
#include <math.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

using std::fabs;
using std::fma;
using std::fmax;
using std::isfinite;
using std::isnan;

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

struct HostIndex {
  uint32_t x;
};

namespace host_cuda {

// As std::barrier, whose waiters however meet in a table shared by all barriers: that would order blocks which nothing
// orders on the device, and so hide their races.
class Barrier {
 public:
  explicit Barrier(uint32_t threads) : threads_(threads) {}

  void arrive_and_wait() {
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.fetch_add(1, std::memory_order_acq_rel);
      syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
      return;
    }
    while (phase_.load(std::memory_order_acquire) == phase) {
      syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0);
    }
  }

 private:
  const uint32_t threads_;
  std::atomic<uint32_t> arrived_{0}, phase_{0};
};

inline int left_out = -1;  // number of the barrier or fence, in the order of the source, that is not carried out

struct Warp {
  Barrier barrier{32};
  uint64_t slot[2][32];
};

struct Block {
  explicit Block(uint32_t threads) : barrier(threads), shared(1 << 16, left_out < 0 ? 0xa5 : 0) {
    for (uint32_t w = 0; w < threads / 32; ++w) warps.push_back(std::make_unique<Warp>());
  }
  Barrier barrier;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<unsigned char> shared;  // not zero, since shared memory is not; but for races to show before a crash does
};

inline thread_local Block* block = nullptr;
inline thread_local int shuffle_parity = 0;
inline thread_local bool fenced = false;               // there was a fence before this thread's next atomic
inline thread_local uint32_t* not_acquired = nullptr;  // what its last atomic read, with no fence since then
constexpr int kBeforeFirst = __COUNTER__;

inline void sync_block(int number) {
  if (number != left_out) block->barrier.arrive_and_wait();
}

inline void fence(int number) {
  if (number == left_out) return;
  fenced = true;
  if (not_acquired != nullptr) std::atomic_ref<uint32_t>(*not_acquired).load(std::memory_order_acquire);
  not_acquired = nullptr;
}

template <class T>
T* shared_memory() {
  static_assert(sizeof(T) <= (1 << 16) && alignof(T) <= 16);
  return reinterpret_cast<T*>(block->shared.data());
}

}  // namespace host_cuda

inline thread_local HostIndex threadIdx{0}, blockIdx{0}, gridDim{0};

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __syncthreads() host_cuda::sync_block(__COUNTER__ - host_cuda::kBeforeFirst - 1)
#define __threadfence() host_cuda::fence(__COUNTER__ - host_cuda::kBeforeFirst - 1)
#define NANSCAN_SHARED(type, name) auto& name = *host_cuda::shared_memory<type>()

template <class T>
T __shfl_xor_sync(uint32_t lanes, T value, int mask) {
  static_assert(sizeof(T) <= 8);
  if (lanes != 0xffffffffu) std::abort();
  const uint32_t lane = threadIdx.x % 32;
  host_cuda::Warp& warp = *host_cuda::block->warps[threadIdx.x / 32];
  const int parity = host_cuda::shuffle_parity;
  host_cuda::shuffle_parity ^= 1;
  std::memcpy(&warp.slot[parity][lane], &value, sizeof value);
  warp.barrier.arrive_and_wait();
  std::memcpy(&value, &warp.slot[parity][lane ^ static_cast<uint32_t>(mask)], sizeof value);
  return value;
}

inline uint32_t atomicInc(uint32_t* address, uint32_t limit) {
  const auto order = host_cuda::fenced ? std::memory_order_release : std::memory_order_relaxed;
  std::atomic_ref<uint32_t> cell(*address);
  uint32_t old = cell.load(std::memory_order_relaxed);
  while (!cell.compare_exchange_weak(old, old >= limit ? 0 : old + 1, order, std::memory_order_relaxed)) {
  }
  host_cuda::not_acquired = address;
  return old;
}

inline uint32_t atomicAdd(uint32_t* address, uint32_t more) {
  return std::atomic_ref<uint32_t>(*address).fetch_add(more, std::memory_order_relaxed);
}

namespace host_cuda {

// Runs `kernel` on `blocks` blocks of `threads` threads, `at_once` blocks at a time.
inline void launch(uint32_t blocks, uint32_t threads, uint32_t at_once, const std::function<void()>& kernel) {
  std::atomic<uint32_t> next{0};
  const auto run_blocks = [&] {
    for (uint32_t b = next.fetch_add(1, std::memory_order_relaxed); b < blocks;
         b = next.fetch_add(1, std::memory_order_relaxed)) {
      Block here(threads);
      std::vector<std::thread> lanes;
      for (uint32_t t = 0; t < threads; ++t) {
        lanes.emplace_back([&, t] {
          block = &here;
          threadIdx.x = t;
          blockIdx.x = b;
          gridDim.x = blocks;
          kernel();
        });
      }
      for (std::thread& lane : lanes) lane.join();
    }
  };
  std::vector<std::thread> runners;
  for (uint32_t r = 0; r < at_once; ++r) runners.emplace_back(run_blocks);
  for (std::thread& runner : runners) runner.join();
}

}  // namespace host_cuda
