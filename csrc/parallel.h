// Runs a function on several threads, on the thread pool that the framework already keeps.
#pragma once

namespace nanscan {

// Threads a parallel call may use: what torch.set_num_threads / OMP_NUM_THREADS allow, 1 in a forked child.
int max_threads();

// Calls body(context) once on each of up to `threads` threads at the same time and returns when all have returned.
// The body divides the work itself; it must be right for any number of callers from 1 up.
void run_on_threads(int threads, void (*body)(void* context), void* context);

// Name of the pool in use, for engine_info: "openmp" (the framework's own runtime) or "std::thread".
const char* thread_pool_name();

}  // namespace nanscan
