// The exact read of a chunk: element by element in double, for chunks that the fast read could not vouch for.
#include <cmath>
#include <cstring>

#include "cpu_fast.inl.h"
#include "scaled_sum.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace nanscan {
namespace {

template <typename V>
V at(const void* data, int64_t i) {  // at any address: memory from elsewhere need not be aligned
  return load<V>(static_cast<const char*>(data) + i * static_cast<int64_t>(sizeof(V)));
}

template <DType T>
double component(const void* data, int64_t i) {
  if constexpr (T == DType::Float32 || T == DType::Complex64) return at<float>(data, i);
  if constexpr (T == DType::Float64 || T == DType::Complex128) return at<double>(data, i);
  if constexpr (T == DType::Float16) return float16_to_float(at<uint16_t>(data, i));
  if constexpr (T == DType::BFloat16) return bfloat16_to_float(at<uint16_t>(data, i));
  if constexpr (T == DType::Float8E4M3FN) return kFloat8.e4m3fn[at<uint8_t>(data, i)];
  if constexpr (T == DType::Float8E5M2) return kFloat8.e5m2[at<uint8_t>(data, i)];
}

enum class Kind { Finite, NaN, Inf };

Kind kind_of(double v) { return std::isfinite(v) ? Kind::Finite : std::isnan(v) ? Kind::NaN : Kind::Inf; }

template <DType T>
Kind element_kind(const void* data, int64_t i) {
  if constexpr (components(T) == 1) return kind_of(component<T>(data, i));
  const Kind re = kind_of(component<T>(data, 2 * i)), im = kind_of(component<T>(data, 2 * i + 1));
  return re == Kind::NaN || im == Kind::NaN ? Kind::NaN : re == Kind::Inf || im == Kind::Inf ? Kind::Inf : Kind::Finite;
}

template <DType T>
double magnitude(const void* data, int64_t i) {
  if constexpr (components(T) == 1) return std::fabs(component<T>(data, i));
  return std::hypot(component<T>(data, 2 * i), component<T>(data, 2 * i + 1));
}

template <DType T>
void count_kinds(const void* data, int64_t count, ExactChunk& out) {
  for (int64_t i = 0; i < count; ++i) {
    const Kind kind = element_kind<T>(data, i);
    if (kind == Kind::Finite) {
      const double size = magnitude<T>(data, i);
      out.absmax = size > out.absmax ? size : out.absmax;
      continue;
    }
    if (out.first_bad < 0) out.first_bad = i;
    (kind == Kind::NaN ? out.nan_count : out.inf_count) += 1;
  }
}

template <DType T>
ExactChunk exact(const void* data, int64_t count) {
  ExactChunk out;
  count_kinds<T>(data, count, out);
  out.sum.exponent = exponent_for(out.absmax);
  const double scale = std::ldexp(1.0, -out.sum.exponent);
  double lanes[8] = {};
  for (int64_t i = 0; i < count; ++i) {
    if (element_kind<T>(data, i) != Kind::Finite) continue;
    for (int64_t c = components(T) * i; c < components(T) * (i + 1); ++c) {
      double v = component<T>(data, c) * scale;
      v *= v;
      NANSCAN_NO_FUSE(v);
      lanes[i & 7] += v;
    }
  }
  out.sum.sumsq = fold<8>(lanes);
  return out;
}

template <DType T>
bool nonfinite(const void* element) {
  return element_kind<T>(element, 0) != Kind::Finite;
}

}  // namespace

ExactChunk read_exact(DType dtype, const void* data, int64_t count) {
  switch (dtype) {
#define NANSCAN_CASE(name, ...) \
  case DType::name:             \
    return exact<DType::name>(data, count);
    NANSCAN_FOR_EACH_DTYPE(NANSCAN_CASE)
#undef NANSCAN_CASE
  }
  return {};
}

bool is_nonfinite(DType dtype, const void* element) {
  switch (dtype) {
#define NANSCAN_CASE(name, ...) \
  case DType::name:             \
    return nonfinite<DType::name>(element);
    NANSCAN_FOR_EACH_DTYPE(NANSCAN_CASE)
#undef NANSCAN_CASE
  }
  return false;
}

#if defined(__SSE2__)
DenormalGuard::DenormalGuard() : saved_(_mm_getcsr()) {
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  if (saved_ & (kFlushToZero | kDenormalsAreZero)) _mm_setcsr(saved_ & ~(kFlushToZero | kDenormalsAreZero));
}
DenormalGuard::~DenormalGuard() { _mm_setcsr(saved_); }
#else
DenormalGuard::DenormalGuard() = default;
DenormalGuard::~DenormalGuard() = default;
#endif

}  // namespace nanscan
