// The CPU scan and the ranges against a long double reference, on buffers that end where the tensor ends (built with
// sanitizers by the test suite: a read outside is reported) and at addresses that are not aligned. Prints a digest of
// every result's bits, once for each instruction set; the digests must agree.
#include "../../csrc/scan_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "../../csrc/batch_check.h"
#include "../../csrc/cpu_fast.inl.h"
#include "../../csrc/cpu_kernels.h"
#include "../../csrc/cpu_ranges.h"
#include "../../csrc/scaled_sum.h"

using namespace nanscan;

namespace {

int failures = 0;

void expect(bool ok, const char* what, DType dtype, int64_t count, int offset) {
  if (ok) return;
  std::printf("FAILED %s: dtype %d, %lld elements, offset %d\n", what, static_cast<int>(dtype),
              static_cast<long long>(count), offset);
  ++failures;
}

uint64_t digest = 1469598103934665603ull;
void add_to_digest(double v) {
  uint64_t bits;
  std::memcpy(&bits, &v, 8);
  digest = (digest ^ bits) * 1099511628211ull;
}

double read(DType t, const char* at) {
  switch (t) {
    case DType::Float32:
    case DType::Complex64:
      return load<float>(at);
    case DType::Float64:
    case DType::Complex128:
      return load<double>(at);
    case DType::Float16:
      return float16_to_float(load<uint16_t>(at));
    case DType::BFloat16:
      return bfloat16_to_float(load<uint16_t>(at));
    case DType::Float8E4M3FN:
      return float8_e4m3fn_to_double(load<uint8_t>(at));
    case DType::Float8E5M2:
      return float8_e5m2_to_double(load<uint8_t>(at));
  }
  return 0;
}

struct Expected {
  long double sumsq = 0, absmax = 0;
  int64_t nan = 0, inf = 0, first = -1;
};

Expected reference(DType t, const char* data, int64_t count) {
  Expected e;
  for (int64_t i = 0; i < count; ++i) {
    long double square = 0;
    bool nan = false, inf = false;
    for (int64_t c = 0; c < components(t); ++c) {
      const long double v = read(t, data + (i * components(t) + c) * component_bytes(t));
      nan |= std::isnan(v);
      inf |= std::isinf(v);
      square += v * v;
    }
    if ((nan || inf) && e.first < 0) e.first = i;
    if (nan) {
      ++e.nan;
    } else if (inf) {
      ++e.inf;
    } else {
      e.sumsq += square;
      e.absmax = std::fmax(e.absmax, std::sqrt(square));
    }
  }
  return e;
}

[[maybe_unused]] void scan_only(DType t, const char* data, int64_t count) {
  std::vector<Entry> entries = {{data, count, 0, static_cast<uint32_t>(t), Entry::kRowMajor}};
  CpuScan out;
  scan_cpu(entries, {}, 1, out);
}

[[maybe_unused]] void check(DType t, const char* data, int64_t count, int offset) {
  const Expected want = reference(t, data, count);
  std::vector<Entry> entries = {{data, count, 0, static_cast<uint32_t>(t), Entry::kRowMajor}};
  CpuScan got;
  scan_cpu(entries, {}, 1, got);
  const double norm = got.rows[0].finite_norm;
  const long double true_norm = std::sqrt(want.sumsq);
  // A norm of finite elements may itself lie beyond the largest double: that is inf. Below the smallest, half of it is
  // lost.
  const bool beyond = true_norm > std::numeric_limits<double>::max();
  const bool near = std::fabs(norm - true_norm) <= 1e-6L * true_norm + 3e-324L;
  expect(beyond ? std::isinf(norm) : near, "norm", t, count, offset);
  expect(std::fabs(got.rows[0].absmax - want.absmax) <= 1e-15L * want.absmax, "absmax", t, count, offset);
  const BadRow bad = got.bad.empty() ? BadRow{0, 0, 0, -1} : got.bad[0];
  expect(bad.nan_count == want.nan && bad.inf_count == want.inf, "counts", t, count, offset);
  expect(bad.first_bad == want.first, "first bad", t, count, offset);
  add_to_digest(norm);
  add_to_digest(got.rows[0].absmax);
}

[[maybe_unused]] void check_ranges(DType t, const char* data, int64_t count, int offset) {
  const Expected want = reference(t, data, count);
  double low = INFINITY, high = -INFINITY;
  int64_t zeros = 0, tiny = 0, positive = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double v = read(t, data + i * element_bytes(t));
    zeros += v == 0;
    tiny += v != 0 && std::fabs(v) < 0x1p-14;
    positive += std::isinf(v) && v > 0;
    if (!std::isfinite(v)) continue;
    low = std::fmin(low, v);
    high = std::fmax(high, v);
  }
  const Ranges got = measure_ranges(t, data, count, nullptr);
  const double norm = norm_of(got.sum);
  const long double true_norm = std::sqrt(want.sumsq);
  const bool beyond = true_norm > std::numeric_limits<double>::max();
  const bool near = std::fabs(norm - true_norm) <= 1e-6L * true_norm + 3e-324L;
  expect(beyond ? std::isinf(norm) : near, "norm of the ranges", t, count, offset);
  expect(got.low == low && got.high == high, "extremes", t, count, offset);
  expect(got.zeros == zeros && got.tiny == tiny, "small ones", t, count, offset);
  expect(got.nan_count == want.nan && got.inf_count == want.inf && got.positive_infs == positive, "kinds", t, count,
         offset);
  for (double v : {norm, got.low, got.high}) add_to_digest(v);
}

// Bit patterns of every kind: uniform bits give all magnitudes, NaN and Inf; narrow ones give ordinary numbers.
void fill(DType t, char* data, int64_t count, int kind, std::mt19937_64& random) {
  for (int64_t i = 0; i < count * element_bytes(t); ++i) data[i] = static_cast<char>(random());
  if (kind == 0) return;
  for (int64_t i = 0; i < count * components(t); ++i) {
    char* at = data + i * component_bytes(t);
    const double v = (static_cast<double>(random() >> 11) * 0x1p-53 - 0.5) * (kind == 1 ? 1.0 : 1e-30);
    if (component_bytes(t) == 4) {
      const float f = static_cast<float>(v);
      std::memcpy(at, &f, 4);
    } else if (component_bytes(t) == 8) {
      const double d = kind == 1 ? v : v * 1e-170;
      std::memcpy(at, &d, 8);
    } else {
      at[component_bytes(t) - 1] &= static_cast<char>(0xbf);  // clears the top exponent bit: finite
    }
  }
}

void check_all(uint64_t seed) {
  std::mt19937_64 random(seed);
  constexpr DType kTypes[] = {
#define NANSCAN_TYPE(name, ...) DType::name,
      NANSCAN_FOR_EACH_DTYPE(NANSCAN_TYPE)
#undef NANSCAN_TYPE
  };
  for (DType t : kTypes) {
    for (int64_t count : {0, 1, 2, 3, 7, 8, 15, 31, 32, 33, 63, 64, 65, 127, 1000, 1023, 1025, 4099, 70001}) {
      for (int offset : {0, 1, 4, 8}) {
        for (int kind = 0; kind < 3; ++kind) {
          const size_t bytes = static_cast<size_t>(count * element_bytes(t) + offset);
          std::unique_ptr<char, void (*)(void*)> memory(static_cast<char*>(std::malloc(bytes + (bytes == 0))),
                                                        std::free);
          fill(t, memory.get() + offset, count, kind, random);
#ifdef NANSCAN_TEST_READ_PAST_END  // proves that the sanitizer sees one element too many
          scan_only(t, memory.get() + offset, count + 1);
#else
          check(t, memory.get() + offset, count, offset);
          if (can_measure_ranges(t)) check_ranges(t, memory.get() + offset, count, offset);
#endif
        }
      }
    }
  }
}

// Many tensors, more than a megabyte: the threaded path, which must answer as the serial one does.
void check_threads() {
  std::mt19937_64 random(7);
  std::vector<std::vector<char>> memory;
  std::vector<Entry> entries;
  for (int i = 0; i < 60; ++i) {
    const int64_t count = 1 + static_cast<int64_t>(random() % 60000);
    memory.emplace_back(count * 4);
    fill(DType::Float32, memory.back().data(), count, i % 9 == 0 ? 0 : 1, random);
  }
  for (const auto& m : memory) {
    entries.push_back(
        {m.data(), static_cast<int64_t>(m.size()) / 4, 0, static_cast<uint32_t>(DType::Float32), Entry::kRowMajor});
  }
  CpuScan all;
  scan_cpu(entries, {}, entries.size(), all);
  ScaledSum total;
  for (size_t i = 0; i < entries.size(); ++i) {
    std::vector<Entry> one = {entries[i]};
    CpuScan alone;
    scan_cpu(one, {}, 1, alone);
    expect(std::memcmp(&alone.rows[0], &all.rows[i], sizeof(Row)) == 0, "threads give the same bits", DType::Float32,
           entries[i].numel, 0);
    add_scaled(total, alone.totals.sum);
  }
  expect(total.sumsq == all.totals.sum.sumsq, "total", DType::Float32, 0, 0);
}

// One tensor of more than a megabyte, read by several threads: each of its parts has what it has alone.
void check_threads_on_one() {
  std::mt19937_64 random(8);
  constexpr int64_t kPart = kChunkBytes / 4, kParts = 40;
  std::vector<char> memory(kPart * kParts * 4);
  fill(DType::Float32, memory.data(), kPart * kParts, 1, random);
  const Ranges all = measure_ranges(DType::Float32, memory.data(), kPart * kParts, nullptr);
  ScaledSum total;
  int64_t tiny = 0;
  for (int64_t i = 0; i < kParts; ++i) {
    const Ranges part = measure_ranges(DType::Float32, memory.data() + i * kChunkBytes, kPart, nullptr);
    add_scaled(total, part.sum);
    tiny += part.tiny;
  }
  expect(total.sumsq == all.sum.sumsq && tiny == all.tiny, "ranges by threads", DType::Float32, kPart * kParts, 0);
}

// Integers at odd addresses, in a few and in many chunks, with one value left out: against a plain loop.
template <typename T>
void check_integers(IntType type) {
  std::mt19937_64 random(9);
  for (int64_t count : {1, 3, 31, 1000, 300000}) {
    std::vector<char> memory(count * sizeof(T) + 1);
    char* data = memory.data() + 1;
    int64_t low = INT64_MAX, high = INT64_MIN;
    const int64_t ignored = 5;
    for (int64_t i = 0; i < count; ++i) {
      const T v = static_cast<T>(random() % 120);
      std::memcpy(data + i * sizeof(T), &v, sizeof(T));
      if (v == ignored) continue;
      low = std::min<int64_t>(low, v), high = std::max<int64_t>(high, v);
    }
    const int64_t rows = count % 10 == 0 ? 10 : 1, shape[] = {rows, count / rows}, strides[] = {1, rows};
    for (const int64_t* order : {static_cast<const int64_t*>(nullptr), strides}) {
      const IntRange found = int_range(type, {data, 2, shape, order}, &ignored);
      expect(found.low == low && found.high == high, "range of integers", DType::Float32, count, 1);
    }
    const bool hidden = any_row_hidden(type, {data, 2, shape, nullptr}, true);
    const bool all_zero = low > high ? false : low == 0 && high == 0;
    expect(hidden == (rows == 1 && all_zero), "hidden rows", DType::Float32, count, 1);
  }
}

// Samples of which one holds a single value: the places looked at lie within the sample, the last ones too.
void check_samples() {
  for (int64_t inner : {1, 2, 5, 33, 100}) {
    std::vector<float> memory(4 * inner);
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = 1.0f + static_cast<float>(i % 7);
    const int64_t shape[] = {4, inner};
    const StridedView view{reinterpret_cast<const char*>(memory.data()), 2, shape, nullptr};
    expect(any_sample_alike(4, view, 32) == (inner == 1), "samples vary", DType::Float32, inner, 0);
    std::fill(memory.end() - inner, memory.end(), 3.0f);
    expect(any_sample_alike(4, view, 4) && any_sample_alike(4, view, 32), "one is alike", DType::Float32, inner, 0);
  }
}

}  // namespace

int main() {
  for (int level : {0, 3, 4}) {
    cap_instruction_set(level);
    digest = 1469598103934665603ull;
#ifndef __SANITIZE_THREAD__  // one thread at a time: nothing to see there
    check_all(1);
#endif
    check_threads();
    check_threads_on_one();
    check_integers<int8_t>(IntType::Int8);
    check_integers<int16_t>(IntType::Int16);
    check_integers<int32_t>(IntType::Int32);
    check_integers<int64_t>(IntType::Int64);
    check_integers<uint8_t>(IntType::UInt8);
    check_samples();
    std::printf("%s %016llx\n", instruction_set(), static_cast<unsigned long long>(digest));
  }
  std::printf(failures == 0 ? "all well\n" : "%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
