// Scans on the host: lists of tensors with planted values, the kernels run on them, and what float64 says.
#pragma once

#include <algorithm>
#include <cfloat>
#include <string>
#include <utility>

#include "scan_cuda_kernel.cuh"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

namespace host_scan {

using namespace nanscan;
using namespace nanscan::cuda;

// ---- checks --------------------------------------------------------------------------------------------------------

inline int checks = 0, failures = 0;

inline void check(bool holds, const std::string& what) {
  ++checks;
  if (!holds && ++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}

inline int report(const char* name) {
  std::printf("%s %s: %d checks, %d failures\n", failures == 0 && checks > 0 ? "ok" : "FAILED", name, checks, failures);
  return failures == 0 && checks > 0 ? 0 : 1;
}

// ---- number formats, decoded bit by bit ----------------------------------------------------------------------------

constexpr DType kDTypes[] = {
#define NANSCAN_LIST(name, ...) DType::name,
    NANSCAN_FOR_EACH_DTYPE(NANSCAN_LIST)
#undef NANSCAN_LIST
};

struct Bits {
  int exponent, fraction;  // widths
  bool has_inf;
};

inline Bits bits_of(DType dtype) {
  switch (dtype) {
    case DType::Float32:
    case DType::Complex64:
      return {8, 23, true};
    case DType::Float16:
      return {5, 10, true};
    case DType::BFloat16:
      return {8, 7, true};
    case DType::Float64:
    case DType::Complex128:
      return {11, 52, true};
    case DType::Float8E5M2:
      return {5, 2, true};
    case DType::Float8E4M3FN:
      return {4, 3, false};
  }
  return {};
}

inline long double decode(DType dtype, uint64_t raw) {
  const Bits b = bits_of(dtype);
  const uint64_t fraction = raw & ((uint64_t{1} << b.fraction) - 1);
  const int exponent = static_cast<int>(raw >> b.fraction & ((uint64_t{1} << b.exponent) - 1));
  const int top = (1 << b.exponent) - 1, bias = top / 2;
  const bool negative = raw >> (b.fraction + b.exponent) & 1;
  const bool all_ones = fraction == (uint64_t{1} << b.fraction) - 1;
  if (exponent == top && b.has_inf) return fraction != 0 ? NAN : negative ? -INFINITY : INFINITY;
  if (exponent == top && all_ones) return NAN;
  const long double digits = exponent == 0 ? fraction : fraction + (uint64_t{1} << b.fraction);
  const long double value = std::ldexp(digits, std::max(exponent, 1) - bias - b.fraction);
  return negative ? -value : value;
}

inline uint64_t nan_bits(DType dtype) {
  const Bits b = bits_of(dtype);
  return (uint64_t{1} << (b.exponent + b.fraction)) - 1;
}

inline uint64_t inf_bits(DType dtype) {
  const Bits b = bits_of(dtype);
  return b.has_inf ? ((uint64_t{1} << b.exponent) - 1) << b.fraction : nan_bits(dtype);
}

// ---- tensors -------------------------------------------------------------------------------------------------------

enum class Magnitude { Usual, Denormal, Largest, Mixed, Zero };
enum class Planted { None, NanFirst, NanLast, InfLast, NanAndInf, AllNan };

inline std::vector<Planted> planted_with(Magnitude magnitude) {
  if (magnitude != Magnitude::Usual) return {Planted::None, Planted::NanAndInf};
  return {Planted::None, Planted::NanFirst, Planted::NanLast, Planted::InfLast, Planted::NanAndInf, Planted::AllNan};
}

inline std::vector<Magnitude> all_magnitudes() {
  return {Magnitude::Usual, Magnitude::Denormal, Magnitude::Largest, Magnitude::Mixed, Magnitude::Zero};
}

inline uint64_t next_random(uint64_t& state) {  // splitmix64
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

inline uint64_t random_bits(DType dtype, Magnitude magnitude, uint64_t& state) {
  const Bits b = bits_of(dtype);
  const uint64_t fraction = next_random(state) & ((uint64_t{1} << b.fraction) - 1), sign = next_random(state) & 1;
  const uint64_t bias = (uint64_t{1} << (b.exponent - 1)) - 1, largest = 2 * bias;
  const uint64_t wide = next_random(state) % (largest + 1);
  const uint64_t exponent = magnitude == Magnitude::Usual      ? bias - 2 + wide % 4
                            : magnitude == Magnitude::Denormal ? 0
                            : magnitude == Magnitude::Largest  ? largest
                                                               : wide;
  if (magnitude == Magnitude::Zero) return sign << (b.exponent + b.fraction);
  return sign << (b.exponent + b.fraction) | exponent << b.fraction | fraction;
}

inline std::vector<int64_t> shifts(DType dtype) {
  const int64_t part = component_bytes(dtype);
  return part == 8 ? std::vector<int64_t>{0, 8} : std::vector<int64_t>{0, part, 8, 16 - part};
}

// A list of tensors. Each has memory of its own, of exactly its size, `shift` bytes past a 16-byte boundary.
struct List {
  struct Memory {
    std::unique_ptr<uint8_t[], void (*)(uint8_t*)> bytes{nullptr, nullptr};
    int64_t shift = 0, size = 0;
  };
  std::vector<Tensor> tensors;
  std::vector<Memory> memory;
  int64_t norm_count = -1;  // -1: all

  void add_bytes(DType dtype, const std::vector<uint8_t>& content, int64_t shift = 0) {
    Memory m;
    const size_t total = static_cast<size_t>(shift) + content.size();
    m.bytes = {static_cast<uint8_t*>(::operator new(total, std::align_val_t{16})),
               [](uint8_t* p) { ::operator delete(p, std::align_val_t{16}); }};
    m.shift = shift;
    m.size = static_cast<int64_t>(content.size());
    std::memset(m.bytes.get(), 0xff, static_cast<size_t>(shift));  // NaN, should it be read after all
    std::copy(content.begin(), content.end(), m.bytes.get() + shift);
    ASAN_POISON_MEMORY_REGION(m.bytes.get(), static_cast<size_t>(shift / 8 * 8));
    tensors.push_back({m.bytes.get() + shift, m.size / element_bytes(dtype), dtype, 0});
    memory.push_back(std::move(m));
  }

  void add(DType dtype, int64_t numel, int64_t shift, Magnitude magnitude, Planted planted, uint64_t seed) {
    const int64_t parts = components(dtype), width = component_bytes(dtype), count = numel * parts;
    std::vector<uint8_t> content(static_cast<size_t>(count * width));
    for (int64_t i = 0; i < count; ++i) {
      uint64_t raw = random_bits(dtype, magnitude, seed);
      if (decode(dtype, raw) != decode(dtype, raw)) raw = 0;  // e4m3fn has its NaN among the largest numbers
      if (planted == Planted::AllNan || (planted == Planted::NanFirst && i == 0)) raw = nan_bits(dtype);
      if (planted == Planted::NanLast && i == count - 1) raw = nan_bits(dtype);
      if (planted == Planted::InfLast && i == count - 1) raw = inf_bits(dtype);
      if (planted == Planted::NanAndInf && i % 97 == 5) raw = i % 2 == 0 ? nan_bits(dtype) : inf_bits(dtype);
      std::memcpy(content.data() + i * width, &raw, static_cast<size_t>(width));
    }
    add_bytes(dtype, content, shift);
  }

  std::vector<uint8_t> bytes(size_t i) const {
    const uint8_t* data = memory[i].bytes.get() + memory[i].shift;
    return {data, data + memory[i].size};
  }

  List copy() const {
    List out;
    for (size_t i = 0; i < tensors.size(); ++i) out.add_bytes(tensors[i].dtype, bytes(i), memory[i].shift);
    return out;
  }

  bool guards_intact() const {
    return std::all_of(memory.begin(), memory.end(), [](const Memory& m) {
      ASAN_UNPOISON_MEMORY_REGION(m.bytes.get(), static_cast<size_t>(m.shift));
      return std::all_of(m.bytes.get(), m.bytes.get() + m.shift, [](uint8_t b) { return b == 0xff; });
    });
  }

  int64_t counted() const { return norm_count < 0 ? static_cast<int64_t>(tensors.size()) : norm_count; }
};

// ---- the reference -------------------------------------------------------------------------------------------------

// x86's long double squares any double without overflow; elsewhere the magnitudes at the ends would need scaling.
static_assert(LDBL_MAX_EXP > 4 * DBL_MAX_EXP, "the reference needs the range of an 80-bit long double");

struct Expected {
  long double sumsq = 0;
  long double absmax = 0;
  int64_t nan_count = 0, inf_count = 0, first_bad = -1;
};

inline Expected expect(const List& list, size_t index) {
  const Tensor& t = list.tensors[index];
  const int64_t parts = components(t.dtype), width = component_bytes(t.dtype);
  const std::vector<uint8_t> content = list.bytes(index);
  const auto value = [&](int64_t i) {
    uint64_t raw = 0;
    std::memcpy(&raw, content.data() + i * width, static_cast<size_t>(width));
    return decode(t.dtype, raw);
  };
  Expected e;
  for (int64_t i = 0; i < t.numel; ++i) {
    const long double re = value(i * parts), im = parts == 2 ? value(i * parts + 1) : 0.0L;
    const long double square = re * re + im * im;
    if (std::isfinite(re) && std::isfinite(im)) {
      e.sumsq += square;
      e.absmax = std::max(e.absmax, parts == 2 ? std::sqrt(square) : std::fabs(re));
      continue;
    }
    (std::isnan(re) || std::isnan(im) ? e.nan_count : e.inf_count) += 1;
    if (e.first_bad < 0) e.first_bad = i;
  }
  return e;
}

// ---- running -------------------------------------------------------------------------------------------------------

struct Aligned {
  std::vector<Row> rows;  // 16-byte aligned memory
  Aligned(int64_t bytes, int fill) : rows(static_cast<size_t>(bytes) / sizeof(Row) + 1) {
    std::memset(static_cast<void*>(rows.data()), fill, rows.size() * sizeof(Row));
  }
  char* data() { return reinterpret_cast<char*>(rows.data()); }
  int64_t bytes() const { return static_cast<int64_t>(rows.size() * sizeof(Row)); }
};

// Full of garbage, but for the ticket: nothing else needs to be zero.
struct Workspace : Aligned {
  explicit Workspace(const List& list)
      : Aligned(workspace_bytes(list.tensors.data(), static_cast<int64_t>(list.tensors.size())), 0x7f) {
    std::memset(data(), 0, kTicketBytes);
  }
};

struct Options {
  uint32_t blocks = 3, at_once = 3;  // all at once: then nothing but the kernel's own fences orders them
  double clip_norm = INFINITY;
  const float* scale = nullptr;
  const float* found = nullptr;
};

struct Answer {
  std::vector<char> bytes;
  Options options;
  int launches = 0;
  Header header() const {
    Header h;
    std::memcpy(&h, bytes.data(), sizeof h);
    return h;
  }
  Row row(size_t i) const {
    Row r;
    std::memcpy(&r, bytes.data() + kRowsOffset + i * sizeof r, sizeof r);
    return r;
  }
};

using SmallScan = Params<ScanHead, kSmallBytes>;

template <class P = SmallScan>
Answer run(const List& list, const Options& options, Workspace& workspace) {
  const auto count = static_cast<int64_t>(list.tensors.size());
  Aligned output(output_bytes(count), 0x7f);
  const Scan scan = {list.tensors.data(),
                     count,
                     list.counted(),
                     workspace.data(),
                     workspace.bytes(),
                     output.data(),
                     output.bytes(),
                     options.scale,
                     options.found,
                     options.clip_norm,
                     nullptr,
                     0,
                     0};
  Answer answer;
  answer.options = options;
  P params;
  plan_scan(scan, params, [&](const P& p) {
    ++answer.launches;
    host_cuda::launch(options.blocks, kThreads, options.at_once, [&] { scan_kernel<P>(p); });
    return 0;
  });
  uint32_t ticket = 1;
  std::memcpy(&ticket, workspace.data(), sizeof ticket);
  check(ticket == 0, "the ticket is ready for the next launch");
  answer.bytes.assign(output.data(), output.data() + output_bytes(count));
  return answer;
}

template <class P = SmallScan>
Answer run(const List& list, const Options& options = {}) {
  Workspace workspace(list);
  return run<P>(list, options, workspace);
}

inline void clear(const List& list, float flag) {
  using P = Params<ClearHead, 256>;
  P params;
  const Clear order = {list.tensors.data(), static_cast<int64_t>(list.tensors.size()), &flag, nullptr, 0, 0};
  plan_clear(order, params, [&](const P& p) {
    host_cuda::launch(3, kThreads, 2, [&] { clear_kernel<P>(p); });
    return 0;
  });
}

// ---- comparing -----------------------------------------------------------------------------------------------------

inline bool close(double got, long double expected, double tolerance) {
  const auto rounded = static_cast<double>(expected);
  if (got == rounded) return true;
  return std::isfinite(got) && std::fabs(got - expected) <= tolerance * std::fabs(expected);
}

// Squares of 8-byte and complex data are added up in double, all others 16 at a time in float.
inline double tolerance_of(DType dtype) {
  return component_bytes(dtype) == 8 || components(dtype) == 2 ? 1e-14 : 1.2e-7;
}

inline void compare_row(const List& list, const Answer& answer, size_t i, const Expected& e) {
  const Tensor& t = list.tensors[i];
  const TensorResult r = to_result(answer.row(i));
  const std::string where = "tensor " + std::to_string(i) + " of dtype " + std::to_string(static_cast<int>(t.dtype)) +
                            ", " + std::to_string(t.numel) + " elements at shift " +
                            std::to_string(list.memory[i].shift);
  const double largest = components(t.dtype) == 2 ? 1e-15 : 0.0;
  const auto say = [&](const char* what, double got, double expected) {
    char text[160];
    std::snprintf(text, sizeof text, "%s: %s is %.17g, not %.17g", where.c_str(), what, got, expected);
    return std::string(text);
  };
  check(close(r.finite_norm, std::sqrt(e.sumsq), tolerance_of(t.dtype)),
        say("finite_norm", r.finite_norm, std::sqrt(e.sumsq)));
  check(close(r.absmax, e.absmax, largest), say("absmax", r.absmax, e.absmax));
  check(r.nan_count == e.nan_count, say("nan_count", r.nan_count, e.nan_count));
  check(r.inf_count == e.inf_count, say("inf_count", r.inf_count, e.inf_count));
  check(r.first_bad == e.first_bad, say("first_bad", r.first_bad, e.first_bad));
}

inline void compare_flags(const Answer& answer, bool bad, double norm) {
  const Header h = answer.header();
  const Options& o = answer.options;
  const double scale = o.scale == nullptr ? 1.0 : *o.scale;
  const double divisor = std::max(1.0, (norm / scale + 1e-6) / o.clip_norm);
  const bool found = bad || (o.found != nullptr && !(*o.found <= 0));
  check(h.found_inf == (found ? 1.0f : 0.0f), "found_inf");
  check(close(h.grad_scale, std::min(scale * divisor, static_cast<double>(FLT_MAX)), 2e-7), "grad_scale");
  check(close(h.clip_factor, found ? 1.0 : 1.0 / divisor, 2e-7), "clip_factor");
}

inline void compare(const List& list, const Answer& answer) {
  Expected counted, all;
  for (size_t i = 0; i < list.tensors.size(); ++i) {
    const Expected e = expect(list, i);
    compare_row(list, answer, i, e);
    for (Expected* total : {&all, &counted}) {
      if (total == &counted && static_cast<int64_t>(i) >= list.counted()) continue;
      total->sumsq += e.sumsq;
      total->absmax = std::max(total->absmax, e.absmax);
      total->nan_count += e.nan_count;
      total->inf_count += e.inf_count;
      if (e.first_bad >= 0 && total->first_bad < 0) total->first_bad = static_cast<int64_t>(i);
    }
  }
  const Header h = answer.header();
  check(close(h.finite_norm, std::sqrt(counted.sumsq), 1.2e-7), "finite_norm of all");
  check(close(h.absmax, counted.absmax, 1e-15), "absmax of all");
  check(h.nan_count == all.nan_count && h.inf_count == all.inf_count, "counts of all");
  check(h.first_bad_tensor == all.first_bad, "first bad tensor");
  if (counted.nan_count > 0) check(std::isnan(h.norm), "norm is NaN");
  if (counted.nan_count == 0) check(h.norm == (counted.inf_count > 0 ? INFINITY : h.finite_norm), "norm");
  compare_flags(answer, all.nan_count + all.inf_count > 0, static_cast<double>(std::sqrt(counted.sumsq)));
}

inline void check_same(const Answer& a, const Answer& b, const std::string& what) {
  check(a.bytes == b.bytes, what + " gives the same bits");
}

}  // namespace host_scan
