#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

namespace nanscan {
namespace {

// The OpenMP runtime is looked up, not linked: a second runtime beside the framework's would fight it for the cores,
// while the framework's own threads are awake and obey its thread count.
struct OpenMP {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*get_max_threads)();
  bool usable() const { return parallel != nullptr && get_max_threads != nullptr; }
};

std::atomic<bool> used_before_fork{false};
std::atomic<bool> pool_lost{false};  // a forked child has none of the pool's threads: waiting for them would hang

void after_fork_in_child() { pool_lost = used_before_fork.load(); }

const OpenMP& openmp() {
  static const OpenMP found = [] {
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
    OpenMP omp;
    omp.parallel = reinterpret_cast<decltype(omp.parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    omp.get_max_threads = reinterpret_cast<decltype(omp.get_max_threads)>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    return omp;
  }();
  return found;
}

int threads_without_openmp() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  const int wanted = text != nullptr ? std::atoi(text) : 0;
  if (wanted > 0) return wanted;
  const unsigned cores = std::thread::hardware_concurrency();
  return cores > 0 ? static_cast<int>(cores) : 1;
}

}  // namespace

int max_threads() {
  const OpenMP& omp = openmp();
  if (pool_lost) return 1;
  return omp.usable() ? omp.get_max_threads() : threads_without_openmp();
}

void run_on_threads(int threads, void (*body)(void* context), void* context) {
  const OpenMP& omp = openmp();
  if (threads <= 1 || pool_lost) return body(context);
  if (omp.usable()) {
    used_before_fork = true;
    return omp.parallel(body, context, static_cast<unsigned>(threads), 0);
  }
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(body, context);
  body(context);
  for (auto& other : others) other.join();
}

const char* thread_pool_name() { return openmp().usable() ? "openmp" : "std::thread"; }

}  // namespace nanscan
