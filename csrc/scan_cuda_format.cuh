// How the kernel reads a chunk's memory: 16 bytes at a time whatever its alignment, decoded to float or double.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "scan_cuda_plan.h"

namespace nanscan::cuda {

#ifdef __CUDACC__
#define NANSCAN_DEVICE __device__ __forceinline__
#define NANSCAN_UNROLL _Pragma("unroll")
#define NANSCAN_NO_UNROLL _Pragma("unroll 1")
#define NANSCAN_SHARED(type, name) __shared__ type name
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#define NANSCAN_PARAMS
#else
#define NANSCAN_PARAMS __grid_constant__  // read in place: no copy in local memory
#endif
#else
#define NANSCAN_DEVICE inline
#define NANSCAN_UNROLL
#define NANSCAN_NO_UNROLL
#define NANSCAN_PARAMS
#endif

template <class To, class From>
NANSCAN_DEVICE To reinterpret_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

NANSCAN_DEVICE float decode_float16(uint16_t bits) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#else
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fff) << 13;
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const float finite = reinterpret_bits<float>(magnitude) * 0x1p112f;  // moves the exponent's bias from 15 to 127
  const uint32_t value = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : reinterpret_bits<uint32_t>(finite);
  return reinterpret_bits<float>(value | sign);
#endif
}

// A sum of a chunk outside [low, high] may have lost digits or hides a NaN or Inf: the chunk is read again, exactly.
constexpr double kFloatLow = 0x1p-100, kDoubleLow = 0x1p-900, kDoubleHigh = 0x1p+900,
                 kAnyFinite = 0x1.fffffffffffffp1023;

template <class B, class V, DType T>
struct FormatOf {
  using Bits = B;
  using Value = V;  // what one component is decoded to, and what squares are first added up in
  static constexpr int kComponentBytes = sizeof(B);
  static constexpr int kComponents = static_cast<int>(components(T));
  static constexpr int kPerVector = 16 / kComponentBytes;
  static_assert(sizeof(B) == component_bytes(T));
};

template <DType T>
struct Format;

template <>
struct Format<DType::Float32> : FormatOf<uint32_t, float, DType::Float32> {
  static constexpr double kLow = kFloatLow, kHigh = kAnyFinite;
  static NANSCAN_DEVICE float decode(uint32_t bits) { return reinterpret_bits<float>(bits); }
};

template <>
struct Format<DType::Float16> : FormatOf<uint16_t, float, DType::Float16> {
  static constexpr double kLow = 0, kHigh = kAnyFinite;  // no square of a float16 leaves float32's range
  static NANSCAN_DEVICE float decode(uint16_t bits) { return decode_float16(bits); }
};

template <>
struct Format<DType::BFloat16> : FormatOf<uint16_t, float, DType::BFloat16> {
  static constexpr double kLow = kFloatLow, kHigh = kAnyFinite;
  static NANSCAN_DEVICE float decode(uint16_t bits) {
    return reinterpret_bits<float>(static_cast<uint32_t>(bits) << 16);
  }
};

template <>
struct Format<DType::Float64> : FormatOf<uint64_t, double, DType::Float64> {
  static constexpr double kLow = kDoubleLow, kHigh = kDoubleHigh;
  static NANSCAN_DEVICE double decode(uint64_t bits) { return reinterpret_bits<double>(bits); }
};

template <>
struct Format<DType::Complex64> : FormatOf<uint32_t, double, DType::Complex64> {
  static constexpr double kLow = 0, kHigh = kAnyFinite;  // squares in double: the magnitude needs them exact
  static NANSCAN_DEVICE double decode(uint32_t bits) { return reinterpret_bits<float>(bits); }
};

template <>
struct Format<DType::Complex128> : FormatOf<uint64_t, double, DType::Complex128> {
  static constexpr double kLow = kDoubleLow, kHigh = kDoubleHigh;
  static NANSCAN_DEVICE double decode(uint64_t bits) { return reinterpret_bits<double>(bits); }
};

template <>
struct Format<DType::Float8E5M2> : FormatOf<uint8_t, float, DType::Float8E5M2> {
  static constexpr double kLow = 0, kHigh = kAnyFinite;
  static NANSCAN_DEVICE float decode(uint8_t bits) { return decode_float16(static_cast<uint16_t>(bits << 8)); }
};

template <>
struct Format<DType::Float8E4M3FN> : FormatOf<uint8_t, float, DType::Float8E4M3FN> {
  static constexpr double kLow = 0, kHigh = kAnyFinite;
  static NANSCAN_DEVICE float decode(uint8_t bits) {
    const float value = decode_float16(static_cast<uint16_t>((bits & 0x7f) << 7 | (bits & 0x80) << 8)) * 256.0f;
    return (bits & 0x7f) == 0x7f ? reinterpret_bits<float>(uint32_t{0x7fc00000}) : value;  // it has NaN but no Inf
  }
};

template <DType T>
NANSCAN_DEVICE void unpack(const uint4& vector, typename Format<T>::Value (&out)[Format<T>::kPerVector]) {
  typename Format<T>::Bits bits[Format<T>::kPerVector];
  memcpy(bits, &vector, 16);
  NANSCAN_UNROLL
  for (int k = 0; k < Format<T>::kPerVector; ++k) out[k] = Format<T>::decode(bits[k]);
}

// A chunk as vectors of 16 bytes, counted from its first element: what a lane reads depends on the elements' indices
// only, so that a copy of a tensor at another alignment gives the same bits.
struct Chunk {
  const char* data;
  uint32_t vectors;      // the last may be shorter
  uint32_t last_bytes;   // bytes of the last vector
  uint32_t shift;        // bytes from the 16-byte boundary before `data`
  uint32_t whole_begin;  // vectors [whole_begin, whole_end) can be loaded whole:
  uint32_t whole_end;    // the aligned 16 (or, shifted, 32) bytes around them are the tensor's own
};

// `before`: bytes of the tensor before the chunk (or any positive number); `after`: bytes after it.
NANSCAN_DEVICE Chunk make_chunk(const char* data, uint32_t bytes, bool before, uint64_t after) {
  Chunk c;
  c.data = data;
  c.vectors = (bytes + 15) / 16;
  c.last_bytes = bytes - 16 * (c.vectors - 1);
  c.shift = static_cast<uint32_t>(reinterpret_cast<uint64_t>(data) & 15);
  c.whole_begin = c.shift != 0 && !before ? 1 : 0;
  c.whole_end = bytes / 16;
  if (c.shift != 0) {
    const uint64_t reach =
        (bytes + after + c.shift) / 16;  // aligned vectors up to the tensor's end, from that of `data`
    if (reach < c.whole_end + uint64_t{1}) c.whole_end = reach == 0 ? 0 : static_cast<uint32_t>(reach - 1);
  }
  return c;
}

NANSCAN_DEVICE uint64_t pair(uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; }

// The 16 bytes that begin `shift` bytes (1 to 15) into the 32 bytes low, high.
NANSCAN_DEVICE uint4 join(uint4 low, uint4 high, uint32_t shift) {
  const uint64_t a0 = pair(low.x, low.y), a1 = pair(low.z, low.w), b0 = pair(high.x, high.y), b1 = pair(high.z, high.w);
  const bool far = shift >= 8;
  const uint64_t x = far ? a1 : a0, y = far ? b0 : a1, z = far ? b1 : b0;
  const uint32_t right = shift % 8 * 8, left = 63 - right;  // y << 1 << left is y << (64 - right), also for right == 0
  const uint64_t first = x >> right | y << 1 << left, second = y >> right | z << 1 << left;
  return {static_cast<uint32_t>(first), static_cast<uint32_t>(first >> 32), static_cast<uint32_t>(second),
          static_cast<uint32_t>(second >> 32)};
}

// Byte by byte, zeros after the end: for a vector that is shorter than 16 bytes or at the edge of a misaligned tensor.
NANSCAN_DEVICE uint4 load_bytes(const Chunk& c, uint32_t i) {
  const uint8_t* from = reinterpret_cast<const uint8_t*>(c.data) + uint64_t{16} * i;
  const uint32_t count = i + 1 == c.vectors ? c.last_bytes : 16;
  uint32_t words[4] = {0, 0, 0, 0};
  NANSCAN_UNROLL
  for (uint32_t k = 0; k < 16; ++k) words[k / 4] |= k < count ? static_cast<uint32_t>(from[k]) << k % 4 * 8 : 0;
  return {words[0], words[1], words[2], words[3]};
}

constexpr int kInFlight = 4;            // 16-byte loads of a lane before their first use
constexpr int kBatch = 32 * kInFlight;  // vectors that a warp loads at once

// Vectors begin + lane, begin + 32 + lane, ...: those behind the chunk's end are zeros, which no sum notices.
NANSCAN_DEVICE void load_batch(const Chunk& c, uint32_t begin, uint32_t lane, uint4 (&out)[kInFlight]) {
  const bool whole = begin >= c.whole_begin && begin + kBatch <= c.whole_end;
  const uint4* const aligned = reinterpret_cast<const uint4*>(c.data) + begin + lane;
  const uint4* const shifted = reinterpret_cast<const uint4*>(c.data - c.shift) + begin + lane;
  if (c.shift == 0) {
    NANSCAN_UNROLL
    for (int j = 0; j < kInFlight; ++j)
      out[j] = begin + 32 * j + lane < c.whole_end ? aligned[32 * j] : uint4{0, 0, 0, 0};
  } else {
    uint4 high[kInFlight];  // the neighbour lane's low: from the L1 cache. All loads first, to be in flight together
    NANSCAN_UNROLL
    for (int j = 0; j < kInFlight; ++j) {
      const uint32_t i = begin + 32 * j + lane;
      const bool inside = i >= c.whole_begin && i < c.whole_end;
      out[j] = inside ? shifted[32 * j] : uint4{0, 0, 0, 0};
      high[j] = inside ? shifted[32 * j + 1] : uint4{0, 0, 0, 0};
    }
    NANSCAN_UNROLL
    for (int j = 0; j < kInFlight; ++j) out[j] = join(out[j], high[j], c.shift);
  }
  if (whole) return;
  NANSCAN_NO_UNROLL
  for (int j = 0; j < kInFlight; ++j) {
    const uint32_t i = begin + 32 * j + lane;
    if (i >= c.vectors || (i >= c.whole_begin && i < c.whole_end)) continue;
    const uint4 edge = load_bytes(c, i);
    NANSCAN_UNROLL
    for (int k = 0; k < kInFlight; ++k)
      out[k] = k == j ? edge : out[k];  // an index known when compiling: no local memory
  }
}

// One component, as a double. For the exact read, which is the same code for all dtypes.
NANSCAN_DEVICE double load_component(DType dtype, const char* data, uint32_t i) {
  switch (dtype) {
#define NANSCAN_CASE(name, ...) \
  case DType::name:             \
    return Format<DType::name>::decode(reinterpret_cast<const Format<DType::name>::Bits*>(data)[i]);
    NANSCAN_FOR_EACH_DTYPE(NANSCAN_CASE)
#undef NANSCAN_CASE
  }
  return 0.0;
}

}  // namespace nanscan::cuda
