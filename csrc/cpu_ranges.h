// The range of one CPU tensor: smallest and largest element, norm, and how many are 0, tiny, NaN or Inf, in one read.
#pragma once

#include <cstdint>
#include <limits>

#include "layout.h"
#include "scan.h"

namespace nanscan {

// What is said of a tensor; a chunk of one has a sum instead of a norm.
struct Ranges {
  ScaledSum sum;                                                      // of squares, over the finite elements
  double low = std::numeric_limits<double>::infinity(), high = -low;  // over the finite ones; low > high: there is none
  int64_t zeros = 0;                                                  // of both signs
  int64_t tiny = 0;  // not 0, and below 2^-14, the smallest normal float16
  int64_t nan_count = 0;
  int64_t inf_count = 0;
  int64_t positive_infs = 0;
};

bool can_measure_ranges(DType dtype);  // real numbers of 16, 32 and 64 bits

// One chunk of flat memory of at most kChunkBytes; `data` needs no alignment.
Ranges read_ranges(DType dtype, const void* data, int64_t count);

// A whole tensor; `layout` is null for a row-major one of `numel` elements. On several threads where that pays; the
// bits are the same on any number of them.
Ranges measure_ranges(DType dtype, const char* data, int64_t numel, const Layout* layout);

}  // namespace nanscan
