#include "scan_cpu.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>

#include "cpu_kernels.h"
#include "parallel.h"
#include "scaled_sum.h"

namespace nanscan {
namespace {

// What is kept of a chunk while the others are read. A NaN in `sumsq` says: see the exact record.
struct Partial {
  double sumsq;
  double absmax;
};
static_assert(sizeof(Partial) == 16, "memory per chunk is part of the engine's contract");

struct ExactRecord {
  uint32_t chunk;
  ExactChunk result;
};

// Elements in a whole chunk, as a power of two: this is asked for every tensor, and a division costs as much as a
// tensor.
constexpr int chunk_shift(DType t) {
  int shift = 0;
  while ((kChunkBytes / element_bytes(t)) >> (shift + 1) != 0) ++shift;
  return shift;
}
constexpr int kChunkShift[] = {
#define NANSCAN_SHIFT(name, ...) chunk_shift(DType::name),
    NANSCAN_FOR_EACH_DTYPE(NANSCAN_SHIFT)
#undef NANSCAN_SHIFT
};

int64_t chunk_elements(const Entry& e) { return int64_t{1} << kChunkShift[e.dtype]; }

uint32_t chunk_count(const Entry& e) {
  return static_cast<uint32_t>((e.numel + chunk_elements(e) - 1) >> kChunkShift[e.dtype]);
}

using Layouts = std::vector<Layout>;

const Layout* layout_of(const Entry& e, const Layouts& layouts) {
  return e.layout == Entry::kRowMajor ? nullptr : &layouts[e.layout];
}

// Reads one chunk; returns true and fills `exact` where the fast read does not suffice.
bool read_chunk(const Entry& e, const Layout* layout, int64_t index, FastChunk& fast, ExactChunk& exact) {
  const int64_t per_chunk = chunk_elements(e), begin = index * per_chunk, count = std::min(per_chunk, e.numel - begin);
  const char* data = e.data + begin * element_bytes(e.type());
  if (layout != nullptr && !layout->flat) {
    static thread_local std::vector<char> tile(kChunkBytes);
    gather(*layout, e.data, element_bytes(e.type()), begin, count, tile.data());
    data = tile.data();
  }
  fast = read_fast(e.type(), data, count);
  if (fast.exact) return false;
  exact = read_exact(e.type(), data, count);
  if (exact.first_bad >= 0) exact.first_bad += begin;
  return true;
}

// Folds the chunks of one tensor, always in order.
class RowFold {
 public:
  void add(const FastChunk& c) { add_sum({c.sumsq, 0}, c.absmax); }
  void add(const ExactChunk& c) {
    add_sum(c.sum, c.absmax);
    nan_ += c.nan_count;
    inf_ += c.inf_count;
    if (first_ < 0) first_ = c.first_bad;
  }
  void finish(const Layout* layout, bool counted, CpuScan& out) {
    const int64_t repeat = layout != nullptr ? layout->repeat : 1;
    sum_.sumsq *= static_cast<double>(repeat);
    if (nan_ + inf_ > 0) {
      const auto row = static_cast<int64_t>(out.rows.size());
      out.bad.push_back({row, nan_ * repeat, inf_ * repeat, first_});
      out.totals.nan_count += nan_ * repeat;
      out.totals.inf_count += inf_ * repeat;
    }
    out.rows.push_back({norm_of(sum_), absmax_});
    if (!counted) return;
    add_scaled(out.totals.sum, sum_);
    out.totals.absmax = std::max(out.totals.absmax, absmax_);
  }

 private:
  void add_sum(const ScaledSum& sum, double absmax) {
    add_scaled(sum_, sum);
    absmax_ = std::max(absmax_, absmax);
  }
  ScaledSum sum_;
  double absmax_ = 0.0;
  int64_t nan_ = 0, inf_ = 0, first_ = -1;
};

void scan_serial(const std::vector<Entry>& entries, const Layouts& layouts, size_t counted, CpuScan& out) {
  FastChunk fast;
  ExactChunk exact;
  for (size_t t = 0; t < entries.size(); ++t) {
    RowFold row;
    const Layout* layout = layout_of(entries[t], layouts);
    const uint32_t chunks = chunk_count(entries[t]);
    for (uint32_t c = 0; c < chunks; ++c)
      read_chunk(entries[t], layout, c, fast, exact) ? row.add(exact) : row.add(fast);
    row.finish(layout, t < counted, out);
  }
}

// Several threads take runs of chunks from one counter; each chunk's answer has its own place. A run is a part of what
// is left, so that the first ones are long (what neighbours share is not carried between cores) and the last ones
// short (all threads end together).
struct ParallelRead {
  const std::vector<Entry>& entries;
  const Layouts& layouts;
  std::vector<Partial>& partials;
  std::vector<ExactRecord>& exacts;
  uint32_t chunks, parts;
  std::atomic<uint32_t> next{0};
  std::mutex lock;

  void work() {
    DenormalGuard denormals;
    for (uint32_t begin = next.load(); begin < chunks;) {
      const uint32_t end = begin + std::max(1u, (chunks - begin) / parts);
      if (!next.compare_exchange_weak(begin, end)) continue;
      read_run(begin, end);
      begin = next.load();
    }
  }

  void read_run(uint32_t begin, uint32_t end) {
    size_t t = std::upper_bound(entries.begin(), entries.end(), begin,
                                [](uint32_t c, const Entry& e) { return c < e.first_chunk; }) -
               entries.begin() - 1;
    FastChunk fast;
    ExactChunk exact;
    for (uint32_t c = begin; c < end; ++c) {
      while (c >= entries[t].first_chunk + chunk_count(entries[t])) ++t;
      if (!read_chunk(entries[t], layout_of(entries[t], layouts), c - entries[t].first_chunk, fast, exact)) {
        partials[c] = {fast.sumsq, fast.absmax};
        continue;
      }
      partials[c] = {std::numeric_limits<double>::quiet_NaN(), 0.0};
      std::lock_guard<std::mutex> hold(lock);
      exacts.push_back({c, exact});
    }
  }
};

struct Scratch {
  std::vector<Partial> partials;
  std::vector<ExactRecord> exacts;
};
thread_local Scratch scratch;

void scan_parallel(const std::vector<Entry>& entries, const Layouts& layouts, uint32_t chunks, int threads,
                   size_t counted, CpuScan& out) {
  scratch.partials.resize(chunks);
  scratch.exacts.clear();
  ParallelRead read{entries, layouts, scratch.partials, scratch.exacts, chunks, threads * 4u, {}, {}};
  run_on_threads(threads, [](void* self) { static_cast<ParallelRead*>(self)->work(); }, &read);
  std::sort(scratch.exacts.begin(), scratch.exacts.end(),
            [](const ExactRecord& a, const ExactRecord& b) { return a.chunk < b.chunk; });
  size_t next_exact = 0;
  for (size_t t = 0; t < entries.size(); ++t) {
    RowFold row;
    const uint32_t end = entries[t].first_chunk + chunk_count(entries[t]);
    for (uint32_t c = entries[t].first_chunk; c < end; ++c) {
      const Partial& p = scratch.partials[c];
      std::isnan(p.sumsq) ? row.add(scratch.exacts[next_exact++].result) : row.add(FastChunk{p.sumsq, p.absmax, true});
    }
    row.finish(layout_of(entries[t], layouts), t < counted, out);
  }
}

}  // namespace

void scan_cpu(std::vector<Entry>& entries, const std::vector<Layout>& layouts, size_t counted, CpuScan& out) {
  DenormalGuard denormals;
  out.rows.reserve(entries.size());
  int64_t bytes = 0, chunks = 0;
  for (Entry& e : entries) {
    e.first_chunk = static_cast<uint32_t>(chunks);
    chunks += chunk_count(e);
    bytes += e.bytes();
  }
  const int threads = bytes < kParallelBytes ? 1 : std::min<int64_t>(max_threads(), chunks);
  if (threads <= 1) return scan_serial(entries, layouts, counted, out);
  scan_parallel(entries, layouts, static_cast<uint32_t>(chunks), threads, counted, out);
}

int64_t scan_cpu_scratch_bytes() {
  return static_cast<int64_t>(scratch.partials.capacity() * sizeof(Partial) +
                              scratch.exacts.capacity() * sizeof(ExactRecord));
}

}  // namespace nanscan
