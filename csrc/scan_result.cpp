#include "scan_result.h"

#include <algorithm>
#include <limits>

#include "scaled_sum.h"

namespace nanscan {

int64_t Segment::logical_index(size_t row, int64_t memory_index) const {
  auto here = std::find_if(permuted.begin(), permuted.end(), [&](const Permuted& p) { return p.row == row; });
  if (here == permuted.end()) return memory_index;
  int64_t logical = 0, step = 1;
  for (size_t d = here->shape.size(); d-- > 0;) {
    if (here->shape[d] == 1) continue;
    logical += memory_index / here->strides[d] % here->shape[d] * step;  // no gaps: each stride is a product of sizes
    step *= here->shape[d];
  }
  return logical;
}

void Scan::finish() {
  ScaledSum sum;
  int64_t counted_nan = 0, counted_inf = 0;
  nan_count = inf_count = 0;
  inf_norm = 0.0;
  for (const Segment& segment : segments) {
    const Totals& totals = segment.result.totals;
    add_scaled(sum, totals.sum);
    inf_norm = std::max(inf_norm, totals.absmax);
    nan_count += totals.nan_count;
    inf_count += totals.inf_count;
    for (const BadRow& bad : segment.result.bad) {
      if (bad.row >= static_cast<int64_t>(segment.counted)) continue;
      counted_nan += bad.nan_count;
      counted_inf += bad.inf_count;
    }
  }
  finite_norm = norm_of(sum);
  constexpr double kInf = std::numeric_limits<double>::infinity();
  norm = counted_nan > 0 ? std::numeric_limits<double>::quiet_NaN() : counted_inf > 0 ? kInf : finite_norm;
}

int64_t Scan::count() const {
  int64_t total = 0;
  for (const Segment& segment : segments) total += static_cast<int64_t>(segment.counted);
  return total;
}

int64_t Scan::nbytes() const {
  int64_t total = sizeof(Scan);
  for (const Segment& s : segments) {
    total += static_cast<int64_t>(sizeof(Segment) + s.positions.capacity() * sizeof(int32_t) +
                                  s.result.rows.capacity() * sizeof(Row) + s.result.bad.capacity() * sizeof(BadRow));
  }
  return total;
}

}  // namespace nanscan
