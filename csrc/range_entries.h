// The ranges of one step of a watched model as they were measured. They become Python objects when somebody reads them.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu_ranges.h"
#include "scaled_sum.h"

namespace nanscan {

// What was read of one tensor.
struct RangeReading {
  DType dtype;
  int64_t numel;
  Ranges ranges;

  double norm() const { return norm_of(ranges.sum); }
  double rms() const {
    const int64_t finite = numel - ranges.nan_count - ranges.inf_count;
    return finite ? norm() / std::sqrt(static_cast<double>(finite)) : std::numeric_limits<double>::quiet_NaN();
  }
};

struct RangeEntries {
  struct Item {
    int32_t row;
    RangeReading reading;
  };
  std::vector<Item> items;  // in the order in which they were measured
  size_t judged = 0;        // so many of the items were looked at
  bool any_inf = false;

  void add(int32_t row, const RangeReading& reading) {
    items.push_back({row, reading});
    any_inf |= reading.ranges.inf_count != 0;
  }

  // Whether each row has one tensor only.
  bool rows_differ() const {
    std::vector<bool> met;
    for (const Item& item : items) {
      const auto row = static_cast<size_t>(item.row);
      if (row >= met.size()) met.resize(row + 1);
      if (met[row]) return false;
      met[row] = true;
    }
    return true;
  }

  // Whether all that was not judged yet is finite and lies within the bound of its dtype.
  template <typename BoundOf>
  bool fresh_within(BoundOf bound_of) const {
    for (size_t i = judged; i < items.size(); ++i) {
      const RangeReading& reading = items[i].reading;
      const Ranges& r = reading.ranges;
      const double bound = bound_of(reading.dtype);
      if (r.nan_count || r.inf_count || r.high > bound || r.low < -bound) return false;
    }
    return true;
  }
};

}  // namespace nanscan
