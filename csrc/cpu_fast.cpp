// The fast read of a chunk: one instance of the vector loops for each instruction set, chosen at run time.
#include <cmath>
#include <cstring>

#include "cpu_targets.h"

namespace nanscan {
namespace {

struct Kernels {
  const char* name;
  int level;
  FastChunk (*float32)(const float*, int64_t);
  FastChunk (*float32_wide)(const float*, int64_t);
  FastChunk (*float64)(const double*, int64_t);
  FastChunk (*bfloat16)(const uint16_t*, int64_t);
  FastChunk (*float16)(const uint16_t*, int64_t);
};

// One instance of every loop for vectors of W bytes.
#define NANSCAN_INSTANTIATE(suffix, target, W)                                                                        \
  target FastChunk float32_##suffix(const float* x, int64_t n) { return fast_float32<W>(x, n, widen_##suffix); }      \
  target FastChunk float32_wide_##suffix(const float* x, int64_t n) { return wide_float32<W>(x, n, widen_##suffix); } \
  target FastChunk float64_##suffix(const double* x, int64_t n) { return fast_float64<W>(x, n); }                     \
  target FastChunk bfloat16_##suffix(const uint16_t* x, int64_t n) { return fast_bfloat16<W>(x, n, widen_##suffix); } \
  target FastChunk float16_##suffix(const uint16_t* x, int64_t n) {                                                   \
    return fast_float16<W>(x, n, widen_##suffix, half_##suffix);                                                      \
  }

NANSCAN_INSTANTIATE(baseline, , 16)
constexpr Kernels kBaseline = {
    "baseline", 0, float32_baseline, float32_wide_baseline, float64_baseline, bfloat16_baseline, float16_baseline};

#ifdef NANSCAN_X86_DISPATCH
NANSCAN_INSTANTIATE(v3, NANSCAN_V3, 32)
constexpr Kernels kV3 = {"x86-64-v3", 3, float32_v3, float32_wide_v3, float64_v3, bfloat16_v3, float16_v3};

NANSCAN_INSTANTIATE(v4, NANSCAN_V4, 64)
constexpr Kernels kV4 = {"x86-64-v4", 4, float32_v4, float32_wide_v4, float64_v4, bfloat16_v4, float16_v4};
#endif

const Kernels* best_kernels(int highest_level) {
#ifdef NANSCAN_X86_DISPATCH
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (v4 && highest_level >= 4) return &kV4;
  if (v3 && highest_level >= 3) return &kV3;
#endif
  (void)highest_level;
  return &kBaseline;
}

const Kernels* kernels = best_kernels(4);

// Eight independent sums keep the adders busy; element i always goes to sum i mod 8.
FastChunk fast_complex64(const char* data, int64_t count) {
  double sums[8] = {}, tops[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    float block[16];
    std::memcpy(block, data + i * 8, sizeof(block));
    for (int l = 0; l < 8; ++l) {
      const double re = block[2 * l], im = block[2 * l + 1], square = re * re + im * im;
      sums[l] += square;
      tops[l] = square > tops[l] ? square : tops[l];
    }
  }
  for (int l = 0; i < count; ++i, ++l) {
    float pair[2];
    std::memcpy(pair, data + i * 8, sizeof(pair));
    const double re = pair[0], im = pair[1], square = re * re + im * im;
    sums[l] += square;
    tops[l] = square > tops[l] ? square : tops[l];
  }
  const double sumsq = fold<8>(sums);
  return {sumsq, std::sqrt(largest<double, 8>(tops)), std::isfinite(sumsq)};
}

// A byte has 256 values: count them, and everything else follows exactly.
FastChunk fast_float8(const uint8_t* x, int64_t count, const double* values) {
  uint32_t counts[4][256] = {};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int l = 0; l < 4; ++l) ++counts[l][x[i + l]];
  }
  for (; i < count; ++i) ++counts[0][x[i]];
  FastChunk out{0.0, 0.0, true};
  for (int bits = 0; bits < 256; ++bits) {
    const uint32_t n = counts[0][bits] + counts[1][bits] + counts[2][bits] + counts[3][bits];
    if (n == 0) continue;
    const double v = values[bits];
    if (!std::isfinite(v)) return {0.0, 0.0, false};
    out.sumsq += n * v * v;
    out.absmax = std::fabs(v) > out.absmax ? std::fabs(v) : out.absmax;
  }
  return out;
}

constexpr int64_t kWideUpTo = 256;  // elements: so few are read as fast in double

}  // namespace

FastChunk read_fast(DType dtype, const void* data, int64_t count) {
  const Kernels& k = *kernels;
  switch (dtype) {
    case DType::Float32: {
      const auto* x = static_cast<const float*>(data);
      if (count <= kWideUpTo) return k.float32_wide(x, count);
      const FastChunk fast = k.float32(x, count);
      return fast.exact || !std::isfinite(fast.absmax) ? fast : k.float32_wide(x, count);
    }
    case DType::Float16:
      return k.float16(static_cast<const uint16_t*>(data), count);
    case DType::BFloat16:
      return k.bfloat16(static_cast<const uint16_t*>(data), count);
    case DType::Float64:
      return k.float64(static_cast<const double*>(data), count);
    case DType::Complex64:
      return fast_complex64(static_cast<const char*>(data), count);
    case DType::Float8E4M3FN:
      return fast_float8(static_cast<const uint8_t*>(data), count, kFloat8.e4m3fn);
    case DType::Float8E5M2:
      return fast_float8(static_cast<const uint8_t*>(data), count, kFloat8.e5m2);
    case DType::Complex128:
      break;  // rare: the exact read only
  }
  return {0.0, 0.0, false};
}

const char* instruction_set() { return kernels->name; }

int instruction_level() { return kernels->level; }

void cap_instruction_set(int level) { kernels = best_kernels(level); }

}  // namespace nanscan
