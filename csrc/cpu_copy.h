// A copy of flat memory that looks for NaN and Inf on the way.
#pragma once

#include <cstdint>
#include <vector>

namespace nanscan {

// What the elements are, as far as finding a NaN or Inf goes: one whose exponent bits are all set.
enum class Words : uint8_t { Plain, Float16, BFloat16, Float32, Float64 };

// A run of memory to be copied; the two do not overlap.
struct CopyJob {
  char* to;
  const char* from;
  int64_t bytes;
  Words words;  // Plain: nothing in it can be NaN
};

// Copies everything; true if no element of it is NaN or Inf.
bool copy_finite(const std::vector<CopyJob>& jobs);

}  // namespace nanscan
