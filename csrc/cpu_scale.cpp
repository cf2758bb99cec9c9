// In-place scaling of gradients for clipping: one read and one write.
#include <atomic>
#include <cmath>
#include <cstring>

#include "cpu_clones.h"
#include "parallel.h"
#include "scan_cpu.h"

namespace nanscan {
namespace {

NANSCAN_CLONES void scale_float32(float* x, int64_t n, float factor, float limit) {
  for (int64_t i = 0; i < n; ++i) {
    float v = x[i] * factor;
    v = v > limit ? limit : v;
    x[i] = v < -limit ? -limit : v;
  }
}

NANSCAN_CLONES void scale_float64(double* x, int64_t n, double factor, double limit) {
  for (int64_t i = 0; i < n; ++i) {
    double v = x[i] * factor;
    v = v > limit ? limit : v;
    x[i] = v < -limit ? -limit : v;
  }
}

inline uint16_t float_to_bfloat16(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  const uint32_t quiet = (bits >> 16) | 0x40;                           // a NaN stays a NaN
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

NANSCAN_CLONES void scale_bfloat16(uint16_t* x, int64_t n, float factor, float limit) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t wide = static_cast<uint32_t>(x[i]) << 16;
    float v;
    std::memcpy(&v, &wide, 4);
    v *= factor;
    v = v > limit ? limit : v;
    x[i] = float_to_bfloat16(v < -limit ? -limit : v);
  }
}

// A smaller factor would be subnormal, or zero, as float32.
bool can_scale_real(double factor) { return std::fabs(factor) >= 0x1p-100; }

}  // namespace

bool can_scale(DType dtype, double factor, double limit) {
  if (dtype == DType::Complex64 || dtype == DType::Complex128) return std::isinf(limit) && can_scale_real(factor);
  return (dtype == DType::Float32 || dtype == DType::Float64 || dtype == DType::BFloat16) && can_scale_real(factor);
}

void scale_flat(DType dtype, void* data, int64_t count, double factor, double limit) {
  switch (dtype) {
    case DType::Complex64:
      return scale_flat(DType::Float32, data, 2 * count, factor, limit);
    case DType::Complex128:
      return scale_flat(DType::Float64, data, 2 * count, factor, limit);
    case DType::Float32:
      return scale_float32(static_cast<float*>(data), count, static_cast<float>(factor), static_cast<float>(limit));
    case DType::Float64:
      return scale_float64(static_cast<double*>(data), count, factor, limit);
    case DType::BFloat16:
      return scale_bfloat16(static_cast<uint16_t*>(data), count, static_cast<float>(factor), static_cast<float>(limit));
    default:
      return;
  }
}

namespace {

struct ParallelScale {
  const std::vector<Entry>& entries;
  double factor, limit;
  std::atomic<size_t> next{0};

  // A thread takes the next tensor; long tensors are cut so that none waits for another.
  void work() {
    for (size_t slice; (slice = next.fetch_add(1)) < entries.size() * kSlices;) {
      const Entry& e = entries[slice / kSlices];
      const int64_t part = static_cast<int64_t>(slice % kSlices), step = (e.numel / kSlices) & ~int64_t{63};
      const int64_t begin = part * step, end = part == kSlices - 1 ? e.numel : begin + step;
      if (begin < end)
        scale_flat(e.type(), const_cast<char*>(e.data) + begin * element_bytes(e.type()), end - begin, factor, limit);
    }
  }
  static constexpr size_t kSlices = 4;
};

}  // namespace

void scale_entries(const std::vector<Entry>& entries, double factor, double limit) {
  int64_t bytes = 0;
  for (const Entry& e : entries) bytes += e.bytes();
  ParallelScale scale{entries, factor, limit, {}};
  const int threads = bytes < kParallelBytes ? 1 : max_threads();
  run_on_threads(threads, [](void* self) { static_cast<ParallelScale*>(self)->work(); }, &scale);
}

}  // namespace nanscan
