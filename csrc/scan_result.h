// The answer of a scan over any number of devices.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "dlpack_abi.h"
#include "scan_cpu.h"

namespace nanscan {

// Shape and strides (elements) of a dense tensor whose memory order is not its logical order.
struct Permuted {
  size_t row;
  std::vector<int64_t> shape, strides;
};

// The rows of one device.
struct Segment {
  dlpack::Device device;
  size_t counted = 0;
  std::vector<int32_t> positions;  // of each row
  CpuScan result;
  std::vector<Permuted> permuted;  // rows on a CUDA device that were read as flat memory, out of logical order

  int64_t logical_index(size_t row, int64_t memory_index) const;
};

struct Scan {
  std::vector<Segment> segments;
  std::vector<std::pair<int32_t, int32_t>> duplicates;  // position, position of the first occurrence
  std::vector<int32_t> resolved;                        // positions that are not plain tensors
  double norm = 0.0, finite_norm = 0.0, inf_norm = 0.0;
  int64_t nan_count = 0, inf_count = 0, numel = 0;
  uint64_t signature = 0;
  bool separate = true;   // every tensor is a plain one with memory of its own, gap-free and shared with nobody
  bool row_major = true;  // every tensor is a plain one whose memory is row-major: no view, nothing shared within it

  void finish();           // totals from the segments
  int64_t count() const;   // unique tensors, extra ones left out
  int64_t nbytes() const;  // memory this answer holds
};

}  // namespace nanscan
