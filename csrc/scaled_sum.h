// Arithmetic on ScaledSum: sums of squares beyond the range of a double, folded without losing either end.
#pragma once

#include <algorithm>
#include <cmath>

#include "scan.h"

namespace nanscan {

// Value of a sum of squares: sumsq * 4^exponent. A zero keeps exponent 0 so that it never pulls the others along.
inline void add_scaled(ScaledSum& total, const ScaledSum& part) {
  if (part.sumsq == 0.0) return;
  if (total.sumsq == 0.0) {
    total = part;
    return;
  }
  if (total.exponent == part.exponent) {
    total.sumsq += part.sumsq;
    return;
  }
  const int32_t top = std::max(total.exponent, part.exponent);
  total.sumsq = std::ldexp(total.sumsq, 2 * (total.exponent - top)) + std::ldexp(part.sumsq, 2 * (part.exponent - top));
  total.exponent = top;
}

inline double norm_of(const ScaledSum& sum) {
  const double root = std::sqrt(sum.sumsq);
  return sum.exponent == 0 ? root : std::ldexp(root, sum.exponent);
}

}  // namespace nanscan
