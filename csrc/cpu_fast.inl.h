// The vector loops, written once for vectors of W bytes. cpu_kernels.cpp instantiates them for each instruction set.
//
// Lanes are fixed by the element's index, never by W, so that every instruction set gives the same bits: products are
// exact in the accumulator's type (float32 in double, 16-bit types in float32), so a fused multiply-add changes
// nothing; the one type whose products round, float64, forbids fusing.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu_kernels.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors never cross a function that is not inlined
#endif

namespace nanscan {

#define NANSCAN_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__)
#define NANSCAN_NO_FUSE(v) asm("" : "+v"(v))
#elif defined(__aarch64__)
#define NANSCAN_NO_FUSE(v) asm("" : "+w"(v))
#else
#define NANSCAN_NO_FUSE(v)
#endif

template <typename T, int Bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(Bytes), may_alias));
};
template <typename T, int Bytes>
using Vector = typename VectorOf<T, Bytes>::type;

template <typename V>
NANSCAN_INLINE V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

template <int N>
NANSCAN_INLINE double fold(double* lanes) {
  for (int width = N / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// Folds N vectors into the first, halves onto each other: the same tree as fold() over all their lanes.
template <int N, typename V>
NANSCAN_INLINE void fold_vectors(V* v) {
  for (int width = N / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  }
}

template <int N, typename V>
NANSCAN_INLINE void largest_vector(V* v) {
  for (int i = 1; i < N; ++i) v[0] = v[i] > v[0] ? v[i] : v[0];
}

template <typename T, int N>
NANSCAN_INLINE T largest(const T* lanes) {
  T top = 0;
  for (int i = 0; i < N; ++i) top = lanes[i] > top ? lanes[i] : top;
  return top;
}

template <typename Int>
struct Reduced {
  double sum;
  Int top;
};

// The sum over all lanes of `sums` and the largest lane of `tops`; both arrays are used up.
template <typename Int, int Sums, int Tops, typename F64, typename IntVector>
NANSCAN_INLINE Reduced<Int> reduce(F64 (&sums)[Sums], IntVector (&tops)[Tops]) {
  fold_vectors<Sums>(sums);
  largest_vector<Tops>(tops);
  double lanes[sizeof(F64) / sizeof(double)];
  Int tops_of[sizeof(IntVector) / sizeof(Int)];
  std::memcpy(lanes, sums, sizeof(lanes));
  std::memcpy(tops_of, tops, sizeof(tops_of));
  return {fold<sizeof(F64) / sizeof(double)>(lanes), largest<Int, sizeof(IntVector) / sizeof(Int)>(tops_of)};
}

// Asks for the cache lines that lie kAhead bytes beyond `here`. The processor's own prefetching stops at every page and
// starts anew there; asking keeps it busy, which is worth a tenth of the time from memory and nothing in cache. A
// request is not a read: it may name memory beyond the tensor, even unmapped, and then does nothing.
constexpr uintptr_t kAhead = 3072;
constexpr uintptr_t kCacheLine = 64;

template <int Bytes>
NANSCAN_INLINE void prefetch_ahead(const void* here) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(here) + kAhead;
  for (uintptr_t line = 0; line < Bytes; line += kCacheLine) __builtin_prefetch(reinterpret_cast<void*>(from + line));
}

// Calls step(pointer to Block elements) for each whole block and once for the rest, padded with zeros (which add
// nothing).
template <typename T, int Block, typename Step>
NANSCAN_INLINE void for_each_block(const T* x, int64_t count, Step step) {
  int64_t i = 0;
  for (; i + Block <= count; i += Block) {
    prefetch_ahead<Block * sizeof(T)>(x + i);
    step(x + i);
  }
  if (i < count) {
    T rest[Block] = {};
    std::memcpy(rest, x + i, static_cast<size_t>(count - i) * sizeof(T));
    step(rest);
  }
}

// ---- float32: 32 float32 lanes, emptied into double every 8 blocks ----
//
// A lane sees at most 9 roundings of 2^-24 before it is emptied: the norm is good to 2.7e-7, whatever the data. In
// cache this is faster than widening each element; from memory both are as fast as the memory.

constexpr float kFloat32Safe[2] = {0x1p-40f, 0x1p60f};  // largest magnitudes whose squares stay well inside float32

template <int W>
NANSCAN_INLINE bool all_zero(const float* x, int64_t count) {
  using I32 = Vector<int32_t, W>;
  I32 any[2] = {};
  for_each_block<float, W / 2>(x, count, [&](const float* p) __attribute__((always_inline)) {
    for (int k = 0; k < 2; ++k) any[k] |= load<I32>(p + k * (W / 4)) & 0x7fffffff;
  });
  any[0] |= any[1];
  int32_t lanes[W / 4], bits = 0;
  std::memcpy(lanes, any, sizeof(lanes));
  for (const int32_t lane : lanes) bits |= lane;
  return bits == 0;
}

// The largest magnitude is found from the largest square, as bits: where squares neither overflow nor vanish, the root
// of a rounded square is the number itself (true in binary, to the last bit), and a NaN shows in the sum. `widen` turns
// W / 8 floats in memory into doubles.
template <int W, typename Widen>
NANSCAN_INLINE FastChunk fast_float32(const float* x, int64_t count, Widen widen) {
  constexpr int kLanes = 32, kBlocks = 8, kWide = W / 8, kSums = kLanes / kWide, kVectors = kLanes * 4 / W;
  using F64 = Vector<double, W>;
  using F32 = Vector<float, W>;
  using I32 = Vector<int32_t, W>;
  F64 sums[kSums] = {};
  I32 tops[kVectors] = {};
  for (int64_t begin = 0; begin < count; begin += kLanes * kBlocks) {
    const int64_t here = count - begin < kLanes * kBlocks ? count - begin : kLanes * kBlocks;
    F32 part[kVectors] = {};
    for_each_block<float, kLanes>(x + begin, here, [&](const float* p) __attribute__((always_inline)) {
      for (int k = 0; k < kVectors; ++k) {
        const F32 v = load<F32>(p + k * (W / 4));
        F32 square = v * v;
        NANSCAN_NO_FUSE(square);
        part[k] += square;
        const I32 bits = reinterpret_cast<I32>(square);
        tops[k] = bits > tops[k] ? bits : tops[k];
      }
    });
    float flat[kLanes];
    std::memcpy(flat, part, sizeof(flat));
    for (int k = 0; k < kSums; ++k) sums[k] += widen(flat + k * kWide);
  }
  const auto [sum, top] = reduce<int32_t>(sums, tops);
  if (std::isnan(sum)) return {sum, sum, false};
  if (top == 0) return {0.0, 0.0, all_zero<W>(x, count)};
  const float absmax = std::sqrt(load<float>(&top));
  const bool safe = absmax >= kFloat32Safe[0] && absmax <= kFloat32Safe[1];
  return {sum, absmax, safe};
}

// The same with every element widened first: for magnitudes whose squares leave float32.
template <int W, typename Widen>
NANSCAN_INLINE FastChunk wide_float32(const float* x, int64_t count, Widen widen) {
  constexpr int kLanes = 32, kWide = W / 8, kSums = kLanes / kWide, kMax = kLanes * 4 / W;
  using F64 = Vector<double, W>;
  using I32 = Vector<int32_t, W>;
  F64 sums[kSums] = {};
  I32 tops[kMax] = {};
  for_each_block<float, kLanes>(x, count, [&](const float* p) __attribute__((always_inline)) {
    for (int k = 0; k < kSums; ++k) {
      const F64 v = widen(p + k * kWide);
      sums[k] += v * v;
    }
    for (int k = 0; k < kMax; ++k) {
      const I32 magnitude = load<I32>(p + k * (W / 4)) & 0x7fffffff;
      tops[k] = magnitude > tops[k] ? magnitude : tops[k];
    }
  });
  const auto [sum, top] = reduce<int32_t>(sums, tops);
  return {sum, load<float>(&top), top < 0x7f800000};
}

// ---- float64: 32 double lanes, products rounded ----

constexpr double kFloat64Safe[2] = {0x1p-450, 0x1p480};  // largest magnitudes whose squares neither overflow nor vanish

// Only float64 data can be so large or small that squares need scaling; everything else keeps exponent 0.
inline int32_t exponent_for(double absmax) {
  if (absmax == 0.0 || (absmax >= kFloat64Safe[0] && absmax <= kFloat64Safe[1])) return 0;
  const int e = std::isinf(absmax) ? 1023 : std::ilogb(absmax);  // a complex128's magnitude may pass the largest double
  return e < -960 ? -960 : e > 1000 ? 1000 : e;
}

template <int W>
NANSCAN_INLINE FastChunk fast_float64(const double* x, int64_t count) {
  constexpr int kLanes = 32, kWide = W / 8, kSums = kLanes / kWide;
  using F64 = Vector<double, W>;
  using I64 = Vector<int64_t, W>;
  F64 sums[kSums] = {};
  I64 tops[kSums] = {};
  for_each_block<double, kLanes>(x, count, [&](const double* p) __attribute__((always_inline)) {
    for (int k = 0; k < kSums; ++k) {
      const F64 v = load<F64>(p + k * kWide);
      F64 square = v * v;
      NANSCAN_NO_FUSE(square);
      sums[k] += square;
      const I64 magnitude = load<I64>(p + k * kWide) & 0x7fffffffffffffff;
      tops[k] = magnitude > tops[k] ? magnitude : tops[k];
    }
  });
  const auto [sum, top] = reduce<int64_t>(sums, tops);
  const double absmax = load<double>(&top);
  const bool safe = absmax >= kFloat64Safe[0] && absmax <= kFloat64Safe[1];  // false for NaN too
  return {sum, absmax, top == 0 || safe};
}

// ---- bfloat16 and float16: two times 32 float32 lanes, emptied into 32 doubles every 16 blocks ----
//
// Products of 16-bit numbers are exact in float32. A lane sees at most 16 roundings of 2^-24 before it is emptied: the
// norm is good to 4.8e-7, whatever the data.

constexpr int kHalfLanes = 64;
constexpr int kHalfBlocks = 16;

struct HalfSum {
  double sumsq;
  uint16_t top;  // largest magnitude, as bits
};

// `square(p, first, second)` adds the squares of 64 elements at p to 2 x 32 lanes; lane i of both ends up in double i.
template <int W, typename Widen, typename Square>
NANSCAN_INLINE HalfSum sum_halves(const uint16_t* x, int64_t count, Widen widen, Square square) {
  constexpr int kWords = W / 2, kVectors = kHalfLanes * 2 / W, kMax = kHalfLanes / kWords;
  constexpr int kDoubles = kHalfLanes / 2, kWide = W / 8, kSums = kDoubles / kWide;
  using F64 = Vector<double, W>;
  using F32 = Vector<float, W>;
  using I16 = Vector<int16_t, W>;
  F64 sums[kSums] = {};
  I16 tops[kMax] = {};
  for (int64_t begin = 0; begin < count; begin += kHalfLanes * kHalfBlocks) {
    const int64_t here = count - begin < kHalfLanes * kHalfBlocks ? count - begin : kHalfLanes * kHalfBlocks;
    F32 first[kVectors] = {}, second[kVectors] = {};
    for_each_block<uint16_t, kHalfLanes>(x + begin, here, [&](const uint16_t* p) __attribute__((always_inline)) {
      square(p, first, second);
      for (int k = 0; k < kMax; ++k) {
        const I16 magnitude = load<I16>(p + k * kWords) & 0x7fff;
        tops[k] = magnitude > tops[k] ? magnitude : tops[k];
      }
    });
    float flat[kHalfLanes];
    std::memcpy(flat, first, sizeof(first));
    std::memcpy(flat + kDoubles, second, sizeof(second));
    for (int k = 0; k < kSums; ++k) sums[k] += widen(flat + k * kWide);
    for (int k = 0; k < kSums; ++k) sums[k] += widen(flat + kDoubles + k * kWide);
  }
  const auto [sum, top] = reduce<int16_t>(sums, tops);
  return {sum, static_cast<uint16_t>(top)};
}

inline float bfloat16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline float float16_to_float(uint16_t bits) {
  const uint32_t exponent = (bits >> 10) & 0x1f, fraction = bits & 0x3ff;
  if (exponent == 0) {
    const float tiny = static_cast<float>(fraction) * 0x1p-24f;
    return bits & 0x8000 ? -tiny : tiny;
  }
  const uint32_t wide = (static_cast<uint32_t>(bits & 0x8000) << 16) |
                        ((exponent == 31 ? 255u : exponent + 112u) << 23) | (fraction << 13);
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline double float8_e4m3fn_to_double(uint8_t bits) {
  const int exponent = (bits >> 3) & 15, fraction = bits & 7;
  if (exponent == 15 && fraction == 7) return std::nan("");
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

inline double float8_e5m2_to_double(uint8_t bits) { return float16_to_float(static_cast<uint16_t>(bits << 8)); }

struct Float8Values {
  double e4m3fn[256], e5m2[256];
  Float8Values() {
    for (int i = 0; i < 256; ++i) {
      e4m3fn[i] = float8_e4m3fn_to_double(static_cast<uint8_t>(i));
      e5m2[i] = float8_e5m2_to_double(static_cast<uint8_t>(i));
    }
  }
};
inline const Float8Values kFloat8;

// Squares of bfloat16 leave float32's range: below and above these magnitudes the chunk is read again in double.
constexpr float kBFloat16Safe[2] = {0x1p-40f, 0x1p60f};

template <int W, typename Widen>
NANSCAN_INLINE FastChunk fast_bfloat16(const uint16_t* x, int64_t count, Widen widen) {
  using F32 = Vector<float, W>;
  using U32 = Vector<uint32_t, W>;
  const auto square = [](const uint16_t* p, F32* first, F32* second) __attribute__((always_inline)) {
    for (int k = 0; k < kHalfLanes * 2 / W; ++k) {  // two elements in each 32-bit word
      const U32 pair = load<U32>(p + k * (W / 2));
      const F32 low = reinterpret_cast<F32>(pair << 16), high = reinterpret_cast<F32>(pair & 0xffff0000u);
      first[k] += low * low;
      second[k] += high * high;
    }
  };
  const HalfSum sum = sum_halves<W>(x, count, widen, square);
  const float absmax = bfloat16_to_float(sum.top);
  const bool safe = absmax >= kBFloat16Safe[0] && absmax <= kBFloat16Safe[1];
  return {sum.sumsq, absmax, sum.top == 0 || safe};
}

template <int W, typename Widen, typename Convert>
NANSCAN_INLINE FastChunk fast_float16(const uint16_t* x, int64_t count, Widen widen, Convert convert) {
  using F32 = Vector<float, W>;
  const auto square = [&](const uint16_t* p, F32* first, F32* second) __attribute__((always_inline)) {
    for (int k = 0; k < kHalfLanes * 2 / W; ++k) {
      const F32 low = convert(p + k * (W / 4)), high = convert(p + kHalfLanes / 2 + k * (W / 4));
      first[k] += low * low;
      second[k] += high * high;
    }
  };
  const HalfSum sum = sum_halves<W>(x, count, widen, square);
  return {sum.sumsq, float16_to_float(sum.top), sum.top < 0x7c00};
}

}  // namespace nanscan
