// Questions about the tensors of a batch whose answer is nearly always "all is well".
#pragma once

#include <cstdint>

#include "layout.h"

namespace nanscan {

enum class IntType : uint8_t { Int8, Int16, Int32, Int64, UInt8 };  // a bool is a UInt8

// How a tensor lies in the host's memory; `strides` (elements; null: row-major) count from `data`.
struct StridedView {
  const char* data;
  int32_t ndim;
  const int64_t* shape;
  const int64_t* strides;
};

struct IntRange {
  int64_t low = INT64_MAX, high = INT64_MIN;  // low > high: there is no element
};

// The least and the largest element, those equal to `*ignored` (null: none) left out. On several threads where that
// pays.
IntRange int_range(IntType type, const StridedView& view, const int64_t* ignored);

// Of a matrix: does each element of some row count as hidden? Hidden is what is zero, or what is not.
bool any_row_hidden(IntType type, const StridedView& matrix, bool zero_hides);

// Does a sample (index of the first dimension) hold one value, not zero, at all of about so many places? Bits are
// compared, so the elements may be of any floating-point type of 2, 4 or 8 bytes.
bool any_sample_alike(int64_t element_bytes, const StridedView& view, int64_t places);

}  // namespace nanscan
