// What one warp says of one chunk, and how such answers are added up. Every order of additions is fixed.
#pragma once

#include "scan_cuda_format.cuh"

namespace nanscan::cuda {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr uint32_t kNoIndex = 0xffffffffu;
constexpr int kRun = 16;        // squares added up in one float: their rounding stays far below 1e-6
constexpr int32_t kStep = 600;  // exponents are -kStep, 0 and kStep: sums of squares of tiny, usual and huge numbers
constexpr double kDown = 0x1p-600;  // 2^-kStep
constexpr double kUp = 0x1p+600;
constexpr double kHuge = 0x1p+450, kTiny = 0x1p-450;  // magnitudes from which on their squares need it

NANSCAN_DEVICE Row empty_row() { return {0.0, 0.0, 0, 0, -1, 0, 0}; }

// sumsq * 4^exponent += other * 4^other_exponent; a zero never pulls the exponent along.
NANSCAN_DEVICE void add_scaled(double& sumsq, int32_t& exponent, double other, int32_t other_exponent) {
  if (exponent != other_exponent && sumsq == 0.0) exponent = other_exponent;
  if (exponent != other_exponent && other != 0.0) {
    NANSCAN_NO_UNROLL
    for (; exponent < other_exponent; exponent += kStep) sumsq = sumsq * kDown * kDown;
    NANSCAN_NO_UNROLL
    for (; other_exponent < exponent; other_exponent += kStep) other = other * kDown * kDown;
  }
  sumsq += other;
}

// The same for all that is known of two parts of a tensor. Indices count from the same element.
NANSCAN_DEVICE void merge(Row& into, const Row& from) {
  add_scaled(into.sumsq, into.exponent, from.sumsq, from.exponent);
  into.absmax = fmax(into.absmax, from.absmax);
  into.nan_count += from.nan_count;
  into.inf_count += from.inf_count;
  const bool earlier = static_cast<uint64_t>(from.first_bad) < static_cast<uint64_t>(into.first_bad);  // -1 is last
  into.first_bad = earlier ? from.first_bad : into.first_bad;
}

template <class V>
NANSCAN_DEVICE V warp_sum(V value) {
  NANSCAN_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) value += __shfl_xor_sync(kAllLanes, value, mask);
  return value;
}

template <class V>
NANSCAN_DEVICE V warp_max(V value) {
  NANSCAN_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) value = fmax(value, __shfl_xor_sync(kAllLanes, value, mask));
  return value;
}

NANSCAN_DEVICE uint32_t warp_min(uint32_t value) {
  NANSCAN_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, value, mask);
    value = other < value ? other : value;
  }
  return value;
}

// Every lane gets the same bits: both partners of an exchange add the same two numbers.
NANSCAN_DEVICE Row warp_merge(Row row) {
  NANSCAN_NO_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    Row other;
    other.sumsq = __shfl_xor_sync(kAllLanes, row.sumsq, mask);
    other.absmax = __shfl_xor_sync(kAllLanes, row.absmax, mask);
    other.nan_count = __shfl_xor_sync(kAllLanes, row.nan_count, mask);
    other.inf_count = __shfl_xor_sync(kAllLanes, row.inf_count, mask);
    other.first_bad = __shfl_xor_sync(kAllLanes, row.first_bad, mask);
    other.exponent = __shfl_xor_sync(kAllLanes, row.exponent, mask);
    other.reserved = 0;
    merge(row, other);
  }
  return row;
}

// ---- the fast read -------------------------------------------------------------------------------------------------

// Adds the squares of a vector's components; `top` is the largest magnitude, squared for complex data.
template <DType T>
NANSCAN_DEVICE void add_squares(const uint4& vector, typename Format<T>::Value& sum, typename Format<T>::Value& top) {
  typename Format<T>::Value x[Format<T>::kPerVector];
  unpack<T>(vector, x);
  NANSCAN_UNROLL
  for (int k = 0; k < Format<T>::kPerVector; k += Format<T>::kComponents) {
    if constexpr (Format<T>::kComponents == 1) {
      sum = fma(x[k], x[k], sum);
      top = fmax(top, fabs(x[k]));
    } else {
      const auto square = fma(x[k], x[k], x[k + 1] * x[k + 1]);
      sum += square;
      top = fmax(top, square);
    }
  }
}

struct Fast {
  double sumsq;
  double absmax;
  bool exact;  // both can be trusted as they are: no NaN, no Inf, nothing lost at either end of the range
};

template <DType T>
NANSCAN_DEVICE Fast read_fast(const Chunk& c, uint32_t lane) {
  using Value = typename Format<T>::Value;
  constexpr int kBatches = kRun / Format<T>::kPerVector;  // until a lane's floats hold kRun squares each
  double total = 0.0;
  Value sum[kInFlight] = {}, top = 0;
  NANSCAN_NO_UNROLL
  for (uint32_t batch = 0; batch * kBatch < c.vectors; ++batch) {
    uint4 vector[kInFlight];
    load_batch(c, batch * kBatch, lane, vector);
    NANSCAN_UNROLL
    for (int j = 0; j < kInFlight; ++j) add_squares<T>(vector[j], sum[j], top);
    if ((batch + 1) % kBatches != 0) continue;
    total += (static_cast<double>(sum[0]) + sum[1]) + (static_cast<double>(sum[2]) + sum[3]);
    NANSCAN_UNROLL
    for (int j = 0; j < kInFlight; ++j) sum[j] = 0;
  }
  total += (static_cast<double>(sum[0]) + sum[1]) + (static_cast<double>(sum[2]) + sum[3]);
  total = warp_sum(total);
  top = warp_max(top);
  const bool zero = Format<T>::kComponents == 1 && top == 0;  // a complex top is a square, which may have vanished
  const bool exact = total <= Format<T>::kHigh && (total >= Format<T>::kLow || zero);  // false for NaN
  const auto largest = static_cast<double>(top);
  return {total, Format<T>::kComponents == 1 ? largest : sqrt(largest), exact};
}

// ---- the exact read ------------------------------------------------------------------------------------------------

// Sums of squares of finite numbers of any magnitude.
struct Squares {
  double usual, huge, tiny;
};

NANSCAN_DEVICE void add_square(Squares& sums, double x) {
  const double size = fabs(x);
  if (size > kHuge) {
    sums.huge = fma(x * kDown, x * kDown, sums.huge);
  } else if (size < kTiny) {
    sums.tiny = fma(x * kUp, x * kUp, sums.tiny);
  } else {
    sums.usual = fma(x, x, sums.usual);
  }
}

// Lane by lane through the elements lane, lane + 32, ...: the same code for all dtypes, since it runs on bad chunks
// only.
NANSCAN_DEVICE Row read_exact(DType dtype, const Chunk& c, uint32_t parts, uint32_t count, uint32_t lane) {
  Squares sums = {0.0, 0.0, 0.0};
  double top = 0.0;
  uint32_t nan = 0, inf = 0, first = kNoIndex;
  NANSCAN_NO_UNROLL
  for (uint32_t i = lane; i < count; i += 32) {
    const double re = load_component(dtype, c.data, i * parts);
    const double im = parts == 2 ? load_component(dtype, c.data, i * parts + 1) : 0.0;
    if (isfinite(re) && isfinite(im)) {
      add_square(sums, re);
      if (parts == 2) add_square(sums, im);
      top = fmax(top, parts == 2 ? hypot(re, im) : fabs(re));
      continue;
    }
    const bool is_nan = isnan(re) || isnan(im);
    nan += is_nan;
    inf += !is_nan;
    first = i < first ? i : first;
  }
  Row out = empty_row();
  out.sumsq = warp_sum(sums.usual);
  add_scaled(out.sumsq, out.exponent, warp_sum(sums.huge), kStep);
  add_scaled(out.sumsq, out.exponent, warp_sum(sums.tiny), -kStep);
  out.absmax = warp_max(top);
  out.nan_count = warp_sum(nan);
  out.inf_count = warp_sum(inf);
  first = warp_min(first);
  out.first_bad = first == kNoIndex ? -1 : static_cast<int64_t>(first);
  return out;
}

// ---- a chunk of any dtype ------------------------------------------------------------------------------------------

struct Place {
  uint32_t entry;  // index of the tensor in this launch
  uint32_t index;  // of the chunk in the tensor
  uint32_t after;  // chunks of the tensor behind this one
};

NANSCAN_DEVICE uint32_t components_of(DType dtype) {
  switch (dtype) {
#define NANSCAN_CASE(name, ...) \
  case DType::name:             \
    return Format<DType::name>::kComponents;
    NANSCAN_FOR_EACH_DTYPE(NANSCAN_CASE)
#undef NANSCAN_CASE
  }
  return 1;
}

NANSCAN_DEVICE uint32_t element_bytes_of(DType dtype) {
  switch (dtype) {
#define NANSCAN_CASE(name, ...) \
  case DType::name:             \
    return Format<DType::name>::kComponents * Format<DType::name>::kComponentBytes;
    NANSCAN_FOR_EACH_DTYPE(NANSCAN_CASE)
#undef NANSCAN_CASE
  }
  return 1;
}

NANSCAN_DEVICE DType dtype_of(const Entry& entry) { return static_cast<DType>(entry.dtype); }

NANSCAN_DEVICE const char* address_of(const Entry& entry, const Place& place) {
  return reinterpret_cast<const char*>(entry.address) + static_cast<uint64_t>(place.index) * kChunkBytes;
}

NANSCAN_DEVICE uint32_t bytes_of(const Entry& entry, const Place& place) {
  return place.after == 0 ? entry.last_count * element_bytes_of(dtype_of(entry)) : static_cast<uint32_t>(kChunkBytes);
}

NANSCAN_DEVICE Fast read_fast_as(DType dtype, const Chunk& c, uint32_t lane) {
  switch (dtype) {
#define NANSCAN_CASE(name, ...) \
  case DType::name:             \
    return read_fast<DType::name>(c, lane);
    NANSCAN_FOR_EACH_DTYPE(NANSCAN_CASE)
#undef NANSCAN_CASE
  }
  return {0.0, 0.0, false};
}

// What one warp finds in one chunk; all lanes get the same. Indices count from the chunk's first element.
NANSCAN_DEVICE Row read_chunk(const Entry& entry, const Place& place, uint32_t lane) {
  const DType dtype = dtype_of(entry);
  const uint32_t bytes = bytes_of(entry, place), element = element_bytes_of(dtype);
  const uint64_t behind =
      place.after == 0 ? 0
                       : static_cast<uint64_t>(place.after - 1) * kChunkBytes + uint64_t{entry.last_count} * element;
  const Chunk chunk = make_chunk(address_of(entry, place), bytes, place.index != 0, behind);
  const Fast fast = read_fast_as(dtype, chunk, lane);
  if (fast.exact) return {fast.sumsq, fast.absmax, 0, 0, -1, 0, 0};
  return read_exact(dtype, chunk, components_of(dtype), bytes / element, lane);  // it is in the cache
}

}  // namespace nanscan::cuda
