#include "batch_check.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <vector>

#include "cpu_clones.h"
#include "cpu_fast.inl.h"
#include "parallel.h"
#include "scan_cpu.h"

namespace nanscan {
namespace {

template <typename T>
NANSCAN_INLINE T element(const char* data, int64_t i) {  // at any address: memory from elsewhere need not be aligned
  return load<T>(data + i * static_cast<int64_t>(sizeof(T)));
}

void widen(IntRange* range, IntRange by) {
  range->low = std::min(range->low, by.low);
  range->high = std::max(range->high, by.high);
}

// Two loops that the compiler turns into vectors; what is ignored is put out of the way of either extreme.
template <typename T>
NANSCAN_INLINE IntRange gapless(const char* data, int64_t count, const T* ignored) {
  T low = std::numeric_limits<T>::max(), high = std::numeric_limits<T>::min();
  if (ignored == nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      const T v = element<T>(data, i);
      low = v < low ? v : low;
      high = v > high ? v : high;
    }
  } else {
    const T out = *ignored, top = low, bottom = high;
    for (int64_t i = 0; i < count; ++i) {
      const T v = element<T>(data, i), up = v == out ? top : v, down = v == out ? bottom : v;
      low = up < low ? up : low;
      high = down > high ? down : high;
    }
  }
  return low > high ? IntRange{} : IntRange{low, high};
}

template <typename T>
IntRange spread(const char* data, int64_t count, int64_t stride, const T* ignored) {
  IntRange range;
  for (int64_t i = 0; i < count; ++i) {
    const T v = element<T>(data, i * stride);
    if (ignored == nullptr || v != *ignored) widen(&range, {v, v});
  }
  return range;
}

#define NANSCAN_INTEGER(name, T)                                                                 \
  NANSCAN_CLONES IntRange gapless_##name(const char* data, int64_t count, const T* ignored) {    \
    return gapless<T>(data, count, ignored);                                                     \
  }                                                                                              \
  IntRange run_##name(const char* data, int64_t count, int64_t stride, const int64_t* ignored) { \
    const bool fits = ignored != nullptr && *ignored == static_cast<T>(*ignored);                \
    const T narrow = fits ? static_cast<T>(*ignored) : T{};                                      \
    const T* out = fits ? &narrow : nullptr;                                                     \
    return stride == 1 ? gapless_##name(data, count, out) : spread<T>(data, count, stride, out); \
  }
NANSCAN_INTEGER(Int8, int8_t)
NANSCAN_INTEGER(Int16, int16_t)
NANSCAN_INTEGER(Int32, int32_t)
NANSCAN_INTEGER(Int64, int64_t)
NANSCAN_INTEGER(UInt8, uint8_t)
#undef NANSCAN_INTEGER

struct IntKernel {
  int64_t bytes;
  IntRange (*run)(const char* data, int64_t count, int64_t stride, const int64_t* ignored);
};
const IntKernel kKernels[] = {{1, run_Int8}, {2, run_Int16}, {4, run_Int32}, {8, run_Int64}, {1, run_UInt8}};

const IntKernel& kernel_of(IntType type) { return kKernels[static_cast<int>(type)]; }

// Several threads take chunks of one gap-free run from a counter.
struct ParallelRange {
  const IntKernel& kernel;
  const char* data;
  int64_t count;
  const int64_t* ignored;
  IntRange range;
  std::atomic<int64_t> next{0};
  std::mutex lock;

  void work() {
    const int64_t step = kChunkBytes / kernel.bytes;
    IntRange mine;
    for (int64_t begin; (begin = next.fetch_add(step)) < count;)
      widen(&mine, kernel.run(data + begin * kernel.bytes, std::min(step, count - begin), 1, ignored));
    std::lock_guard<std::mutex> hold(lock);
    widen(&range, mine);
  }
};

IntRange range_of_run(const IntKernel& kernel, const char* data, int64_t count, const int64_t* ignored) {
  if (count * kernel.bytes < kParallelBytes || max_threads() <= 1) return kernel.run(data, count, 1, ignored);
  ParallelRange read{kernel, data, count, ignored, {}, {}, {}};
  run_on_threads(max_threads(), [](void* self) { static_cast<ParallelRange*>(self)->work(); }, &read);
  return read.range;
}

// Visits every run along the innermost dimension.
IntRange range_of_dims(const IntKernel& kernel, const char* data, const Dim* dim, const Dim* last,
                       const int64_t* ignored) {
  if (dim == last) return kernel.run(data, dim->size, dim->stride, ignored);
  IntRange range;
  for (int64_t i = 0; i < dim->size; ++i)
    widen(&range, range_of_dims(kernel, data + i * dim->stride * kernel.bytes, dim + 1, last, ignored));
  return range;
}

// Where, in elements from the start, the element lies whose index within its sample is `index` in logical order.
int64_t offset_within_sample(const StridedView& view, int64_t index) {
  int64_t offset = 0;
  for (int32_t d = view.ndim - 1; d > 0 && index > 0; --d) {
    offset += index % view.shape[d] * view.strides[d];
    index /= view.shape[d];
  }
  return offset;
}

uint64_t bits_at(const char* place, int64_t bytes) {
  if (bytes == 2) return load<uint16_t>(place);
  return bytes == 4 ? load<uint32_t>(place) : load<uint64_t>(place);
}

bool is_zero(uint64_t bits, int64_t bytes) { return (bits & ~(uint64_t{1} << (bytes * 8 - 1))) == 0; }

bool all_alike(const char* sample, int64_t bytes, const std::vector<int64_t>& offsets) {
  const uint64_t first = bits_at(sample, bytes);
  for (int64_t offset : offsets) {
    if (bits_at(sample + offset, bytes) != first) return false;
  }
  return !is_zero(first, bytes);
}

}  // namespace

IntRange int_range(IntType type, const StridedView& view, const int64_t* ignored) {
  const IntKernel& kernel = kernel_of(type);
  if (is_row_major(view.ndim, view.shape, view.strides))
    return range_of_run(kernel, view.data, count_elements(view.ndim, view.shape), ignored);
  const Layout layout = make_layout(view.ndim, view.shape, view.strides);
  if (layout.flat) return range_of_run(kernel, view.data, layout.numel, ignored);
  return range_of_dims(kernel, view.data, layout.dims.data(), &layout.dims.back(), ignored);
}

bool any_row_hidden(IntType type, const StridedView& matrix, bool zero_hides) {
  const int64_t bytes = kernel_of(type).bytes, row_stride = matrix.strides ? matrix.strides[0] : matrix.shape[1];
  const int64_t stride = (matrix.strides ? matrix.strides[1] : 1) * bytes;
  for (int64_t row = 0; row < matrix.shape[0]; ++row) {
    const char* place = matrix.data + row * row_stride * bytes;
    int64_t key = 0;
    const auto hidden = [&] {
      bool zero = true;
      for (int64_t b = 0; b < bytes; ++b) zero &= place[key * stride + b] == 0;
      return zero == zero_hides;
    };
    while (key < matrix.shape[1] && hidden()) ++key;
    if (key == matrix.shape[1]) return true;
  }
  return false;
}

bool any_sample_alike(int64_t element_bytes, const StridedView& view, int64_t places) {
  const int64_t samples = view.shape[0], inner = count_elements(view.ndim - 1, view.shape + 1);
  std::vector<int64_t> strides(view.ndim, 1);
  for (int32_t d = view.ndim - 2; d >= 0; --d) strides[d] = strides[d + 1] * view.shape[d + 1];
  if (view.strides != nullptr) strides.assign(view.strides, view.strides + view.ndim);
  const StridedView strided{view.data, view.ndim, view.shape, strides.data()};
  std::vector<int64_t> offsets;
  for (int64_t i = std::max<int64_t>(1, inner / places), step = i; i < inner; i += step)
    offsets.push_back(offset_within_sample(strided, i) * element_bytes);
  const int64_t sample_bytes = strides[0] * element_bytes;
  constexpr int64_t kAhead = 16;  // each place is far from the others: ask for it before it is needed
  for (int64_t i = 0; i < samples + kAhead; ++i) {
    if (i < samples) {
      __builtin_prefetch(view.data + i * sample_bytes);
      if (!offsets.empty()) __builtin_prefetch(view.data + i * sample_bytes + offsets[0]);
    }
    if (i >= kAhead && all_alike(view.data + (i - kAhead) * sample_bytes, element_bytes, offsets)) return true;
  }
  return false;
}

}  // namespace nanscan
