// What one scan is told and what it answers: plain data, shared by every part of the engine.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace nanscan {

// What a scan says of one tensor.
struct TensorResult {
  double finite_norm = 0.0;  // 2-norm over the finite elements
  double absmax = 0.0;       // largest magnitude over the finite elements; 0 if there is none
  int64_t nan_count = 0;     // elements (a complex element counts once, as NaN if either part is NaN)
  int64_t inf_count = 0;
  int64_t first_bad = -1;  // flat index of the first non-finite element, in the order the tensor was read; -1: none
};

// A sum of squares that cannot overflow or vanish: the value is sumsq * 4^exponent (exponent is 0 unless float64 data
// needs it).
struct ScaledSum {
  double sumsq = 0.0;
  int32_t exponent = 0;
};

}  // namespace nanscan
