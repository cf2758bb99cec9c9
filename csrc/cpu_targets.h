// For which instruction sets the vector loops are compiled, and the conversions that each does in one instruction.
#pragma once

#include "cpu_fast.inl.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define NANSCAN_X86_DISPATCH 1
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own _mm512_undefined_ps
#endif

namespace nanscan {
namespace {

// For vectors of W bytes `widen` turns W / 8 floats in memory into doubles, `half` W / 4 float16 into floats.
constexpr auto widen_baseline = [](const float* p) { return Vector<double, 16>{load<float>(p), load<float>(p + 1)}; };
constexpr auto half_baseline = [](const uint16_t* p) {
  Vector<float, 16> v;
  for (int i = 0; i < 4; ++i) v[i] = float16_to_float(load<uint16_t>(p + i));
  return v;
};

#ifdef NANSCAN_X86_DISPATCH
#define NANSCAN_V3 __attribute__((target("avx2,fma,f16c")))
#define NANSCAN_V4 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))

constexpr auto widen_v3 = [](const float* p) NANSCAN_V3 {
  return reinterpret_cast<Vector<double, 32>>(_mm256_cvtps_pd(_mm_loadu_ps(p)));
};
constexpr auto half_v3 = [](const uint16_t* p) NANSCAN_V3 {
  return reinterpret_cast<Vector<float, 32>>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
};

constexpr auto widen_v4 = [](const float* p) NANSCAN_V4 {  // GCC would convert in halves
  return reinterpret_cast<Vector<double, 64>>(_mm512_cvtps_pd(_mm256_loadu_ps(p)));
};
constexpr auto half_v4 = [](const uint16_t* p) NANSCAN_V4 {
  return reinterpret_cast<Vector<float, 64>>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
};
#endif

}  // namespace
}  // namespace nanscan
