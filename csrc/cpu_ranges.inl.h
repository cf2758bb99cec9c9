// The vector loops behind the ranges, written once for vectors of W bytes as those of cpu_fast.inl.h are, and with the
// same promise: lanes are fixed by the element's index, so that every instruction set gives the same bits.
//
// Each loop has two forms. The plain one takes all elements to be finite and of ordinary magnitude; what it says is of
// no use where one is not. The careful one counts NaN and Inf, leaves them out, and adds every square in double.
#pragma once

#include <algorithm>
#include <limits>

#include "cpu_fast.inl.h"
#include "cpu_ranges.h"

namespace nanscan {

// Bits that tell numbers of a type apart.
template <typename Int>
struct Format {
  Int tiny;      // 2^-14
  Int infinity;  // above it: NaN
};
constexpr Format<int16_t> kFloat16Bits = {0x0400, 0x7c00};
constexpr Format<int16_t> kBFloat16Bits = {0x3880, 0x7f80};
constexpr Format<int32_t> kFloat32Bits = {0x38800000, 0x7f800000};
constexpr Format<int64_t> kFloat64Bits = {0x3f10000000000000, 0x7ff0000000000000};

// An activation was just written, half of it by other cores, whose caches answer slowly: what lies far ahead is called
// for as well, into the second-level cache.
constexpr uintptr_t kFarAhead = 8192;

template <int Bytes>
NANSCAN_INLINE void prefetch_far_ahead(const void* here) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(here) + kFarAhead;
  for (uintptr_t line = 0; line < Bytes; line += kCacheLine)
    __builtin_prefetch(reinterpret_cast<void*>(from + line), 0, 1);
}

// As for_each_block, for step(p, q): q is p, but for the rest, which is padded with zeros at p (they add nothing to a
// sum) and with its own first element at q (it changes no extreme). Returns how many zeros were added.
template <typename T, int Block, typename Step>
NANSCAN_INLINE int64_t for_each_padded_block(const T* x, int64_t count, Step step) {
  int64_t i = 0;
  for (; i + Block <= count; i += Block) {
    prefetch_ahead<Block * sizeof(T)>(x + i);
    prefetch_far_ahead<Block * sizeof(T)>(x + i);
    step(x + i, x + i);
  }
  if (i == count) return 0;
  T rest[Block] = {}, filled[Block];
  const T first = load<T>(x + i);
  for (T& at : filled) at = first;
  std::memcpy(rest, x + i, static_cast<size_t>(count - i) * sizeof(T));
  std::memcpy(filled, x + i, static_cast<size_t>(count - i) * sizeof(T));
  step(rest, filled);
  return Block - (count - i);
}

template <typename V, typename T>
NANSCAN_INLINE V all_lanes(T value) {
  return V{} + value;
}

// How many elements are of each kind. A lane of 16 bits sees no more than 4,096 elements of a chunk.
template <int W, typename Int, bool Careful>
struct Counts {
  using Bits = Vector<Int, W>;
  Bits zeros = {}, small = {}, nans = {}, infs = {}, positive = {};

  NANSCAN_INLINE void add(Bits bits, Format<Int> format) {
    const Bits magnitude = bits & std::numeric_limits<Int>::max();
    zeros = add_where(zeros, magnitude == 0);
    small = add_where(small, magnitude < format.tiny);
    if constexpr (Careful) {
      nans = add_where(nans, magnitude > format.infinity);
      infs = add_where(infs, magnitude == format.infinity);
      positive = add_where(positive, bits == format.infinity);
    }
  }

  // The same of finite float32, told by `square`, which is there anyway; where it rounds, it stays on its side.
  template <typename V>
  NANSCAN_INLINE void add_by_square(V value, V square) {
    zeros = add_where(zeros, value == 0.0f);
    small = add_where(small, square < 0x1p-28f);
  }

  // One more in the lanes where `mask` holds. Where masks are registers of their own, an addition can take one.
  template <typename Mask>
  static NANSCAN_INLINE Bits add_where(Bits count, Mask mask) {
    if constexpr (W == 64) return mask ? count + all_lanes<Bits>(Int{1}) : count;
    return count - reinterpret_cast<Bits>(mask);
  }

  static NANSCAN_INLINE int64_t total(const Bits& count) {
    Int lanes[W / sizeof(Int)];
    std::memcpy(lanes, &count, W);
    int64_t sum = 0;
    for (Int lane : lanes) sum += lane;
    return sum;
  }

  NANSCAN_INLINE void give(int64_t padding, Ranges& out) const {
    out.zeros = total(zeros) - padding;
    out.tiny = total(small) - padding - out.zeros;
    if constexpr (Careful) {
      out.nan_count = total(nans);
      out.inf_count = total(infs);
      out.positive_infs = total(positive);
    }
  }
};

// The smallest and the largest element, in two vectors each: a comparison waits for the one before.
template <int W, typename Float, typename Int, bool Careful>
struct Extremes {
  using V = Vector<Float, W>;
  using Bits = Vector<Int, W>;
  static constexpr Float kInf = std::numeric_limits<Float>::infinity();
  V low[2] = {all_lanes<V>(kInf), all_lanes<V>(kInf)}, high[2] = {all_lanes<V>(-kInf), all_lanes<V>(-kInf)};

  static NANSCAN_INLINE Bits finite(V v, Int infinity) {  // all bits of a lane, or none
    return reinterpret_cast<Bits>((reinterpret_cast<Bits>(v) & std::numeric_limits<Int>::max()) < infinity);
  }
  static NANSCAN_INLINE V finite_or_zero(V v, Int infinity) {
    return reinterpret_cast<V>(reinterpret_cast<Bits>(v) & finite(v, infinity));
  }

  NANSCAN_INLINE void add(int k, V v, Int infinity) {
    V &least = low[k & 1], &most = high[k & 1], least_of = v, most_of = v;
    if constexpr (Careful) {
      const Bits good = finite(v, infinity);
      least_of = good ? v : all_lanes<V>(kInf);
      most_of = good ? v : all_lanes<V>(-kInf);
    }
    least = least_of < least ? least_of : least;
    most = most_of > most ? most_of : most;
  }

  NANSCAN_INLINE void give(Ranges& out) const {
    Float lows[2 * W / sizeof(Float)], highs[2 * W / sizeof(Float)];
    std::memcpy(lows, low, sizeof(lows));
    std::memcpy(highs, high, sizeof(highs));
    Float least = kInf, most = -kInf;
    for (Float v : lows) least = v < least ? v : least;
    for (Float v : highs) most = v > most ? v : most;
    out.low = least + 0.0;  // not -0.0: which of two zeros is met first depends on W
    out.high = most + 0.0;
  }
};

// Doubles to which squares are added, by element; at the end a tree.
constexpr int kRangeSums = 32;

template <int W>
NANSCAN_INLINE double total_of(Vector<double, W> (&sums)[kRangeSums * 8 / W]) {
  fold_vectors<kRangeSums * 8 / W>(sums);
  double lanes[W / 8];
  std::memcpy(lanes, sums, sizeof(lanes));
  return fold<W / 8>(lanes);
}

// float32 and what converts to it, in blocks of kBlock elements: convert(p, k) is the k-th vector of one. Lanes of
// float32 see at most 16 roundings of 2^-24 before they are emptied into double, as in cpu_fast.inl.h.
template <int W, bool Careful, typename T, typename Int, typename Widen, typename Convert>
NANSCAN_INLINE Ranges ranges_of_floats(const T* x, int64_t count, Format<Int> format, Widen widen, Convert convert) {
  constexpr int kBlock = 128 / sizeof(T), kBlocks = 16;
  constexpr bool kBySquare = sizeof(T) == 4 && !Careful;
  constexpr int kFloats = W / 4, kDoubles = W / 8, kWords = W / sizeof(T), kSums = kRangeSums / kDoubles;
  using F32 = Vector<float, W>;
  using Edges = Extremes<W, float, int32_t, Careful>;
  Vector<double, W> sums[kSums] = {};
  Counts<W, Int, Careful> counts;
  Edges extremes;
  int64_t padding = 0;
  const auto empty = [&](const F32* part) __attribute__((always_inline)) {
    float flat[kBlock];
    std::memcpy(flat, part, sizeof(flat));
    for (int k = 0; k < kBlock / kDoubles; ++k) {
      const Vector<double, W> v = widen(flat + k * kDoubles);
      sums[k % kSums] += Careful ? v * v : v;
    }
  };
  for (int64_t begin = 0; begin < count; begin += kBlock * kBlocks) {
    const int64_t here = std::min<int64_t>(count - begin, kBlock * kBlocks);
    F32 part[kBlock / kFloats] = {};
    padding +=
        for_each_padded_block<T, kBlock>(x + begin, here, [&](const T* p, const T* q) __attribute__((always_inline)) {
          for (int k = 0; k < kBlock / kWords && !kBySquare; ++k) {
            counts.add(load<Vector<Int, W>>(p + k * kWords), format);
          }
          for (int k = 0; k < kBlock / kFloats; ++k) {
            const F32 v = convert(p, k);
            extremes.add(k, p == q ? v : convert(q, k), kFloat32Bits.infinity);
            if constexpr (Careful) {
              part[k] = Edges::finite_or_zero(v, kFloat32Bits.infinity);
            } else {
              F32 square = v * v;
              if constexpr (sizeof(T) == 4) NANSCAN_NO_FUSE(square);  // those of 16-bit numbers are exact
              part[k] += square;
              if constexpr (kBySquare) counts.add_by_square(v, square);
            }
          }
          if constexpr (Careful) empty(part);
        });
    if constexpr (!Careful) empty(part);
  }
  Ranges out;
  extremes.give(out);
  counts.give(padding, out);
  out.sum.sumsq = total_of<W>(sums);
  return out;
}

template <int W, bool Careful, typename Widen>
NANSCAN_INLINE Ranges ranges_float32(const float* x, int64_t count, Widen widen) {
  const auto as_it_is = [](const float* p, int k)
                            __attribute__((always_inline)) { return load<Vector<float, W>>(p + k * (W / 4)); };
  return ranges_of_floats<W, Careful>(x, count, kFloat32Bits, widen, as_it_is);
}

template <int W, bool Careful, typename Widen>
NANSCAN_INLINE Ranges ranges_bfloat16(const uint16_t* x, int64_t count, Widen widen) {
  const auto convert = [](const uint16_t* p, int k)
                           __attribute__((always_inline)) {  // the even ones, then the odd ones
                             constexpr int kHalf = 64 * 2 / W;
                             const auto pair = load<Vector<uint32_t, W>>(p + k % kHalf * (W / 2));
                             return reinterpret_cast<Vector<float, W>>(k < kHalf ? pair << 16 : pair & 0xffff0000u);
                           };
  return ranges_of_floats<W, Careful>(x, count, kBFloat16Bits, widen, convert);
}

template <int W, bool Careful, typename Widen, typename Half>
NANSCAN_INLINE Ranges ranges_float16(const uint16_t* x, int64_t count, Widen widen, Half half) {
  const auto convert = [&](const uint16_t* p, int k) __attribute__((always_inline)) { return half(p + k * (W / 4)); };
  return ranges_of_floats<W, Careful>(x, count, kFloat16Bits, widen, convert);
}

// Squares round, so nothing is fused; those of very large or small numbers need a `scale`, a power of two.
template <int W, bool Careful>
NANSCAN_INLINE Ranges ranges_float64(const double* x, int64_t count, double scale) {
  constexpr int kDoubles = W / 8, kSums = kRangeSums / kDoubles;
  using F64 = Vector<double, W>;
  F64 sums[kSums] = {};
  Counts<W, int64_t, Careful> counts;
  Extremes<W, double, int64_t, Careful> extremes;
  const int64_t padding =
      for_each_padded_block<double, 32>(x, count, [&](const double* p, const double* q) __attribute__((always_inline)) {
        for (int k = 0; k < kSums; ++k) {
          counts.add(load<Vector<int64_t, W>>(p + k * kDoubles), kFloat64Bits);
          F64 v = load<F64>(p + k * kDoubles);
          extremes.add(k, load<F64>(q + k * kDoubles), kFloat64Bits.infinity);
          if constexpr (Careful) v = extremes.finite_or_zero(v, kFloat64Bits.infinity) * scale;
          F64 square = v * v;
          NANSCAN_NO_FUSE(square);
          sums[k] += square;
        }
      });
  Ranges out;
  extremes.give(out);
  counts.give(padding, out);
  out.sum.sumsq = total_of<W>(sums);
  return out;
}

}  // namespace nanscan
