#include "cpu_copy.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu_clones.h"
#include "parallel.h"
#include "scan_cpu.h"

namespace nanscan {
namespace {

// Memory is copied a piece at a time, and looked at while the piece is in the cache that the copy brought it to.
constexpr int64_t kPieceBytes = 128 * 1024;
constexpr int64_t kJobBytes = 1 << 20;  // that a thread takes at once

// The words of a tensor, which may lie at any address.
typedef uint16_t Word16 __attribute__((aligned(1), may_alias));
typedef uint32_t Word32 __attribute__((aligned(1), may_alias));
typedef uint64_t Word64 __attribute__((aligned(1), may_alias));

NANSCAN_CLONES bool any_set16(const Word16* x, int64_t n, uint16_t exponent) {
  uint16_t found = 0;
  for (int64_t i = 0; i < n; ++i) found |= static_cast<uint16_t>((x[i] & exponent) == exponent);
  return found != 0;
}

NANSCAN_CLONES bool any_set32(const Word32* x, int64_t n, uint32_t exponent) {
  uint32_t found = 0;
  for (int64_t i = 0; i < n; ++i) found |= static_cast<uint32_t>((x[i] & exponent) == exponent);
  return found != 0;
}

NANSCAN_CLONES bool any_set64(const Word64* x, int64_t n, uint64_t exponent) {
  uint64_t found = 0;
  for (int64_t i = 0; i < n; ++i) found |= static_cast<uint64_t>((x[i] & exponent) == exponent);
  return found != 0;
}

bool any_nonfinite(Words words, const char* data, int64_t bytes) {
  switch (words) {
    case Words::Float16:
      return any_set16(reinterpret_cast<const Word16*>(data), bytes / 2, 0x7c00);
    case Words::BFloat16:
      return any_set16(reinterpret_cast<const Word16*>(data), bytes / 2, 0x7f80);
    case Words::Float32:
      return any_set32(reinterpret_cast<const Word32*>(data), bytes / 4, 0x7f800000);
    case Words::Float64:
      return any_set64(reinterpret_cast<const Word64*>(data), bytes / 8, 0x7ff0000000000000);
    default:
      return false;
  }
}

bool copy_one(const CopyJob& job) {
  bool finite = true;
  for (int64_t at = 0; at < job.bytes; at += kPieceBytes) {
    const int64_t size = std::min(kPieceBytes, job.bytes - at);
    std::memcpy(job.to + at, job.from + at, static_cast<size_t>(size));
    finite &= !any_nonfinite(job.words, job.to + at, size);  // of the copy: that is what is kept
  }
  return finite;
}

struct ParallelCopy {
  const std::vector<CopyJob>& jobs;
  std::atomic<size_t> next{0};
  std::atomic<bool> finite{true};

  void work() {
    for (size_t job; (job = next.fetch_add(1)) < jobs.size();) {
      if (!copy_one(jobs[job])) finite = false;
    }
  }
};

std::vector<CopyJob> cut(const std::vector<CopyJob>& jobs) {
  std::vector<CopyJob> parts;
  parts.reserve(jobs.size());
  for (const CopyJob& job : jobs) {
    for (int64_t at = 0; at < job.bytes; at += kJobBytes)
      parts.push_back({job.to + at, job.from + at, std::min(kJobBytes, job.bytes - at), job.words});
  }
  return parts;
}

}  // namespace

bool copy_finite(const std::vector<CopyJob>& jobs) {
  int64_t bytes = 0;
  for (const CopyJob& job : jobs) bytes += job.bytes;
  const std::vector<CopyJob> parts = cut(jobs);
  ParallelCopy copy{parts, {}, {true}};
  const int threads = bytes < kParallelBytes ? 1 : max_threads();
  run_on_threads(threads, [](void* self) { static_cast<ParallelCopy*>(self)->work(); }, &copy);
  return copy.finite;
}

}  // namespace nanscan
