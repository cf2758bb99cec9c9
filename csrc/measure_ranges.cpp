// The range of a whole CPU tensor: its chunks, on one thread or several, folded in order.
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "cpu_kernels.h"
#include "cpu_ranges.h"
#include "parallel.h"
#include "scaled_sum.h"
#include "scan_cpu.h"

namespace nanscan {
namespace {

// From here on several threads read: other cores wrote a part of a fresh tensor, which they read faster than this one.
constexpr int64_t kParallelRangeBytes = 2 * kChunkBytes;

struct Chunked {
  DType dtype;
  const char* data;
  int64_t numel;
  const Layout* layout;

  int64_t chunk_elements() const { return kChunkBytes / element_bytes(dtype); }
  int64_t chunks() const { return (numel + chunk_elements() - 1) / chunk_elements(); }

  Ranges read(int64_t chunk) const {
    const int64_t begin = chunk * chunk_elements(), count = std::min(chunk_elements(), numel - begin);
    if (layout == nullptr || layout->flat) return read_ranges(dtype, data + begin * element_bytes(dtype), count);
    static thread_local std::vector<char> tile(kChunkBytes);
    gather(*layout, data, element_bytes(dtype), begin, count, tile.data());
    return read_ranges(dtype, tile.data(), count);
  }
};

void add(Ranges& total, const Ranges& part) {
  add_scaled(total.sum, part.sum);
  total.low = std::min(total.low, part.low);
  total.high = std::max(total.high, part.high);
  total.zeros += part.zeros;
  total.tiny += part.tiny;
  total.nan_count += part.nan_count;
  total.inf_count += part.inf_count;
  total.positive_infs += part.positive_infs;
}

// Several threads take chunks, the calling one from the front and the others from the back, as a framework's threads
// divide a tensor among them: each finds more of it in its own cache. Each chunk's answer has its own place.
struct ParallelRanges {
  const Chunked& tensor;
  std::vector<Ranges>& answers;
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int64_t> taken{0}, from_back{0};

  void work() {
    DenormalGuard denormals;
    const bool is_caller = std::this_thread::get_id() == caller;
    const auto chunks = static_cast<int64_t>(answers.size());
    for (int64_t from_front = 0; taken.fetch_add(1) < chunks;) {
      const int64_t chunk = is_caller ? from_front++ : chunks - 1 - from_back.fetch_add(1);
      answers[chunk] = tensor.read(chunk);
    }
  }
};

Ranges read_on_threads(const Chunked& tensor, int threads) {
  std::vector<Ranges> answers(static_cast<size_t>(tensor.chunks()));
  ParallelRanges read{tensor, answers};
  run_on_threads(threads, [](void* self) { static_cast<ParallelRanges*>(self)->work(); }, &read);
  Ranges total;
  for (const Ranges& part : answers) add(total, part);
  return total;
}

// Each element that was read occurs `times` times.
void repeat(Ranges& r, int64_t times) {
  r.sum.sumsq *= static_cast<double>(times);
  for (int64_t* count : {&r.zeros, &r.tiny, &r.nan_count, &r.inf_count, &r.positive_infs}) *count *= times;
}

}  // namespace

Ranges measure_ranges(DType dtype, const char* data, int64_t numel, const Layout* layout) {
  DenormalGuard denormals;
  const Chunked tensor{dtype, data, numel, layout};
  const int64_t bytes = numel * element_bytes(dtype);
  const int threads =
      bytes < kParallelRangeBytes ? 1 : static_cast<int>(std::min<int64_t>(max_threads(), tensor.chunks()));
  Ranges total;
  if (threads > 1) {
    total = read_on_threads(tensor, threads);
  } else {
    for (int64_t chunk = 0; chunk < tensor.chunks(); ++chunk) add(total, tensor.read(chunk));
  }
  if (layout != nullptr) repeat(total, layout->repeat);
  return total;
}

}  // namespace nanscan
