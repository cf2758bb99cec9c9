// The CPU scan: a list of tensors in, one row per tensor and the totals out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout.h"
#include "scan.h"

namespace nanscan {

constexpr int64_t kParallelBytes = 1 << 19;  // below this, waking threads costs more than it saves
constexpr int64_t kChunkBytes = 64 * 1024;  // boundaries depend on sizes only, so results never depend on thread counts

// One tensor to read. Most are row-major and need no more than this; the others have an entry in a list of layouts.
struct Entry {
  const char* data;
  int64_t numel;         // elements to visit
  uint32_t first_chunk;  // filled by scan_cpu
  uint32_t dtype : 8;
  uint32_t layout : 24;  // index into the list of layouts, kRowMajor: none needed

  static constexpr uint32_t kRowMajor = (1u << 24) - 1;
  DType type() const { return static_cast<DType>(dtype); }
  int64_t bytes() const { return numel * element_bytes(type()); }
};
static_assert(sizeof(Entry) == 24, "memory per tensor is part of the engine's contract");

// What is kept of a healthy tensor.
struct Row {
  double finite_norm;
  double absmax;
};

// What is added for a tensor with a NaN or Inf.
struct BadRow {
  int64_t row;
  int64_t nan_count;
  int64_t inf_count;
  int64_t first_bad;  // in the order read; exact for row-major tensors, the caller finds the logical index of others
};

struct Totals {
  ScaledSum sum;
  double absmax = 0.0;
  int64_t nan_count = 0;
  int64_t inf_count = 0;
};

struct CpuScan {
  std::vector<Row> rows;
  std::vector<BadRow> bad;  // in order of row
  Totals totals;            // sum and absmax over rows [0, counted); counts over all rows
};

// Scans `entries`; rows from `counted` on (a loss, say) join the counts but not the norms.
// Uses several threads only above a size at which waking them pays.
void scan_cpu(std::vector<Entry>& entries, const std::vector<Layout>& layouts, size_t counted, CpuScan& out);

// In place on flat entries whose types can_scale() accepts: x = clamp(x * factor, -limit, limit).
void scale_entries(const std::vector<Entry>& entries, double factor, double limit);

// Bytes of scratch the last scan of this thread used beside its result, for measuring.
int64_t scan_cpu_scratch_bytes();

}  // namespace nanscan
