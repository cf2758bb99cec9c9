// Leaf loops of the CPU engine: one chunk of flat memory in, a sum of squares and a largest magnitude out.
#pragma once

#include <cstdint>

#include "scan.h"

namespace nanscan {

// What the first, fast read of a chunk says.
struct FastChunk {
  double sumsq;
  double absmax;
  bool exact;  // false: an element is non-finite, or the fast sum may have lost digits; read the chunk again, slowly
};

// What the slow read says, element by element.
struct ExactChunk {
  ScaledSum sum;  // over the finite elements
  double absmax = 0.0;
  int64_t nan_count = 0;
  int64_t inf_count = 0;
  int64_t first_bad = -1;  // index within the chunk
};

// `data` needs no alignment beyond the type's own; `count` is in elements.
FastChunk read_fast(DType dtype, const void* data, int64_t count);
ExactChunk read_exact(DType dtype, const void* data, int64_t count);

bool is_nonfinite(DType dtype, const void* element);

// In place: x = clamp(x * factor, -limit, limit); an infinite limit clamps nothing. The framework does what can_scale()
// declines.
bool can_scale(DType dtype, double factor, double limit);
void scale_flat(DType dtype, void* data, int64_t count, double factor, double limit);

// The instruction set chosen at run time: "x86-64-v4", "x86-64-v3" or "baseline".
const char* instruction_set();
int instruction_level();  // 4, 3 or 0

// For tests: use nothing above x86-64-v`level` (0: the baseline). Every choice must give the same bits.
void cap_instruction_set(int level);

// Loops may rely on denormal numbers being numbers: torch.set_flush_denormal(True) turns them into zero for a whole
// thread.
class DenormalGuard {
 public:
  DenormalGuard();
  ~DenormalGuard();
  DenormalGuard(const DenormalGuard&) = delete;
  DenormalGuard& operator=(const DenormalGuard&) = delete;

 private:
  unsigned saved_ = 0;
};

}  // namespace nanscan
