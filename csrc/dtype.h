// The one list of element types the engine reads. CPU, CUDA and the Python binding expand it; nobody writes it twice.
#pragma once

#include <cstdint>

namespace nanscan {

// X(name, torch name, bytes per real component, DLPack type code, DLPack bits per element, real components per element)
#define NANSCAN_FOR_EACH_DTYPE(X)                             \
  X(Float32, "float32", 4, kDLFloat, 32, 1)                   \
  X(Float16, "float16", 2, kDLFloat, 16, 1)                   \
  X(BFloat16, "bfloat16", 2, kDLBfloat, 16, 1)                \
  X(Float64, "float64", 8, kDLFloat, 64, 1)                   \
  X(Complex64, "complex64", 4, kDLComplex, 64, 2)             \
  X(Complex128, "complex128", 8, kDLComplex, 128, 2)          \
  X(Float8E4M3FN, "float8_e4m3fn", 1, kDLFloat8_e4m3fn, 8, 1) \
  X(Float8E5M2, "float8_e5m2", 1, kDLFloat8_e5m2, 8, 1)

enum class DType : int32_t {
#define NANSCAN_ENUM(name, ...) name,
  NANSCAN_FOR_EACH_DTYPE(NANSCAN_ENUM)
#undef NANSCAN_ENUM
};

constexpr int64_t kComponentBytes[] = {
#define NANSCAN_BYTES(name, text, bytes, ...) bytes,
    NANSCAN_FOR_EACH_DTYPE(NANSCAN_BYTES)
#undef NANSCAN_BYTES
};

constexpr int64_t kComponents[] = {
#define NANSCAN_COMPONENTS(name, text, bytes, code, bits, components) components,
    NANSCAN_FOR_EACH_DTYPE(NANSCAN_COMPONENTS)
#undef NANSCAN_COMPONENTS
};

constexpr int64_t component_bytes(DType t) { return kComponentBytes[static_cast<int>(t)]; }
constexpr int64_t components(DType t) { return kComponents[static_cast<int>(t)]; }
constexpr int64_t element_bytes(DType t) { return component_bytes(t) * components(t); }

}  // namespace nanscan
