// The range of a chunk: one instance of the vector loops for each instruction set, chosen at run time.
#include <algorithm>
#include <cmath>

#include "cpu_kernels.h"
#include "cpu_ranges.inl.h"
#include "cpu_targets.h"

namespace nanscan {
namespace {

struct Kernels {
  Ranges (*float32)(const float*, int64_t);
  Ranges (*bfloat16)(const uint16_t*, int64_t);
  Ranges (*float16)(const uint16_t*, int64_t);
  Ranges (*float64)(const double*, int64_t, double scale);
};

// One instance of every loop for vectors of W bytes.
#define NANSCAN_INSTANTIATE(name, suffix, target, W, careful)                                                          \
  target Ranges float32_##name(const float* x, int64_t n) { return ranges_float32<W, careful>(x, n, widen_##suffix); } \
  target Ranges bfloat16_##name(const uint16_t* x, int64_t n) {                                                        \
    return ranges_bfloat16<W, careful>(x, n, widen_##suffix);                                                          \
  }                                                                                                                    \
  target Ranges float16_##name(const uint16_t* x, int64_t n) {                                                         \
    return ranges_float16<W, careful>(x, n, widen_##suffix, half_##suffix);                                            \
  }                                                                                                                    \
  target Ranges float64_##name(const double* x, int64_t n, double scale) {                                             \
    return ranges_float64<W, careful>(x, n, scale);                                                                    \
  }                                                                                                                    \
  constexpr Kernels kernels_##name = {float32_##name, bfloat16_##name, float16_##name, float64_##name};

NANSCAN_INSTANTIATE(plain_baseline, baseline, , 16, false)
NANSCAN_INSTANTIATE(careful_baseline, baseline, , 16, true)
#ifdef NANSCAN_X86_DISPATCH
NANSCAN_INSTANTIATE(plain_v3, v3, NANSCAN_V3, 32, false)
NANSCAN_INSTANTIATE(careful_v3, v3, NANSCAN_V3, 32, true)
NANSCAN_INSTANTIATE(plain_v4, v4, NANSCAN_V4, 64, false)
NANSCAN_INSTANTIATE(careful_v4, v4, NANSCAN_V4, 64, true)
#endif

const Kernels& kernels(bool careful) {
#ifdef NANSCAN_X86_DISPATCH
  switch (instruction_level()) {
    case 4:
      return careful ? kernels_careful_v4 : kernels_plain_v4;
    case 3:
      return careful ? kernels_careful_v3 : kernels_plain_v3;
  }
#endif
  return careful ? kernels_careful_baseline : kernels_plain_baseline;
}

Ranges read_with(const Kernels& k, DType dtype, const void* data, int64_t count, double scale) {
  switch (dtype) {
    case DType::Float32:
      return k.float32(static_cast<const float*>(data), count);
    case DType::BFloat16:
      return k.bfloat16(static_cast<const uint16_t*>(data), count);
    case DType::Float16:
      return k.float16(static_cast<const uint16_t*>(data), count);
    case DType::Float64:
      return k.float64(static_cast<const double*>(data), count, scale);
    default:
      return {};
  }
}

double largest_magnitude(const Ranges& r) { return std::max({-r.low, r.high, 0.0}); }

// Whether the plain form's sum of squares is right: NaN and Inf are in it, and squares may overflow or vanish.
bool is_safe(DType dtype, const Ranges& r) {
  const double top = largest_magnitude(r);
  if (!std::isfinite(r.sum.sumsq)) return false;
  if (top == 0.0 || dtype == DType::Float16) return true;
  if (dtype == DType::Float64) return exponent_for(top) == 0;
  static_assert(kFloat32Safe[0] == kBFloat16Safe[0] && kFloat32Safe[1] == kBFloat16Safe[1]);
  return top >= kFloat32Safe[0] && top <= kFloat32Safe[1];
}

}  // namespace

bool can_measure_ranges(DType dtype) {
  return dtype == DType::Float32 || dtype == DType::BFloat16 || dtype == DType::Float16 || dtype == DType::Float64;
}

Ranges read_ranges(DType dtype, const void* data, int64_t count) {
  const Ranges plain = read_with(kernels(false), dtype, data, count, 1.0);
  if (is_safe(dtype, plain)) return plain;
  const Ranges careful = read_with(kernels(true), dtype, data, count, 1.0);
  const int32_t exponent = dtype == DType::Float64 ? exponent_for(largest_magnitude(careful)) : 0;
  if (exponent == 0) return careful;
  Ranges scaled = read_with(kernels(true), dtype, data, count, std::ldexp(1.0, -exponent));
  scaled.sum.exponent = exponent;
  return scaled;
}

}  // namespace nanscan
