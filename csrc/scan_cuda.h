// The CUDA part of the engine, as a plain C interface: no torch, no Python, no CUDA header.
//
// It lives in a shared library of its own (nvcc builds it from scan_cuda.cu, with the CUDA runtime linked in
// statically), so that a machine without GPU, driver or toolkit never has to load it. How to use it:
//
//   auto get = reinterpret_cast<const nanscan::cuda::Api* (*)()>(dlsym(dlopen(path, RTLD_NOW | RTLD_LOCAL),
//                                                                      "nanscan_cuda_api"));
//   const nanscan::cuda::Api* api = get();          // refuse it unless api->abi_version == nanscan::cuda::kAbiVersion
//   api->device_count(text, sizeof text);           // < 0: no usable driver or device, and the text says why
//
// and for each scan, with `tensors` (dense flat memory on one device) and every buffer from the framework's allocator:
//
//   output    = uninitialised device memory, api->output_bytes(count) bytes, 16-byte aligned, fresh for each scan
//   workspace = device memory, at least api->workspace_bytes(tensors, count) bytes, 16-byte aligned; filled with zeros
//               ONCE when it is allocated, then reused: one workspace for each (device, stream), and one of its own for
//               each captured graph. Two scans that may overlap must not share one.
//   api->launch(&scan, text, sizeof text);          // 0, or an error and its text; nothing was waited for
//
// In stream order the output then holds a Header followed by one Row per tensor, in the order given. found_inf and
// grad_scale are 0-dim float32 views of it (kFoundInfOffset, kGradScaleOffset): hand them to a fused optimizer as they
// are. Copy the first kRowsOffset bytes to the host to know whether all is well; the rows only if they are wanted.
// Nothing here synchronises, allocates, or needs the tensors' memory to outlive more than the work queued on the
// stream.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "scan.h"

namespace nanscan::cuda {

constexpr uint32_t kAbiVersion = 1;

// A tensor as dense flat memory on the device. Its address must be a multiple of the size of a real component.
struct Tensor {
  const void* data;  // may be null if numel is 0
  int64_t numel;     // elements; a complex element is one
  DType dtype;
  int32_t reserved;  // 0
};

// What is known of one tensor (and, inside the kernel, of any part of one). The sum of squares is sumsq * 4^exponent.
struct alignas(16) Row {
  double sumsq;       // over the finite elements
  double absmax;      // largest magnitude over the finite elements, 0 if there is none
  int64_t nan_count;  // elements; a complex element counts once, as NaN if either part is NaN
  int64_t inf_count;
  int64_t first_bad;  // flat index of the first non-finite element in memory order, -1: none
  int32_t exponent;   // 0 unless float64 or complex128 data needs it
  int32_t reserved;
};

// What is known of all of them.
struct alignas(16) Header {
  double norm;         // of the first `norm_count` tensors: NaN if they hold a NaN, inf if an Inf, else finite_norm
  double finite_norm;  // over their finite elements
  double absmax;       // over their finite elements
  double clip_factor;  // what the gradients are to be multiplied by, <= 1; 1 where nothing is clipped or found_inf is 1
  int64_t nan_count;   // over all tensors
  int64_t inf_count;
  int64_t first_bad_tensor;  // index of the first tensor with a NaN or Inf, -1: none
  // Exactly 1.0f if any tensor has a NaN or Inf, the incoming flag is not <= 0, or the incoming scale is not a positive
  // finite number; else 0.0f.
  float found_inf;
  float grad_scale;  // what a fused optimizer must divide by: incoming scale / clip_factor
};

constexpr int64_t kRowsOffset = sizeof(Header);
constexpr int64_t kFoundInfOffset = offsetof(Header, found_inf);
constexpr int64_t kGradScaleOffset = offsetof(Header, grad_scale);
static_assert(sizeof(Tensor) == 24 && sizeof(Row) == 48 && sizeof(Header) == 64, "both sides of the interface agree");
static_assert(offsetof(Row, first_bad) == 32 && offsetof(Row, exponent) == 40);
static_assert(kFoundInfOffset == 56 && kGradScaleOffset == 60 && kRowsOffset % alignof(Row) == 0);

struct Scan {
  const Tensor* tensors;  // host memory, read before launch() returns
  int64_t count;
  int64_t norm_count;       // tensors from this index on (a loss, say) join the counts and found_inf, not the norms
  void* workspace;          // device
  int64_t workspace_bytes;  // what it has
  void* output;             // device
  int64_t output_bytes;     // what it has
  const float* grad_scale;  // device; null: 1.0. The gradients are still multiplied by it
  const float* found_inf;   // device; null: 0.0
  double clip_norm;         // positive; infinity: do not clip
  void* stream;             // cudaStream_t
  int32_t device;
  int32_t reserved;  // 0
};

// Fills the tensors with zeros if *flag is 1.0 when the stream gets there; else leaves them alone.
struct Clear {
  const Tensor* tensors;  // host memory, read before clear_if() returns
  int64_t count;
  const float* flag;  // device
  void* stream;       // cudaStream_t
  int32_t device;
  int32_t reserved;  // 0
};

// Functions return 0 if all went well (counts and sizes where they say so). Otherwise `error`, of `error_bytes` bytes,
// holds one line: what failed, on which device, and why. A negative result is a fault of the caller or of the machine;
// a positive one is the cudaError_t.
struct Api {
  uint32_t abi_version;
  uint32_t struct_bytes;                                             // sizeof(Api)
  const char* build;                                                 // such as "CUDA 13.0, sm_75 sm_80"
  int32_t (*device_count)(char* error, int64_t error_bytes);         // devices, or < 0
  int64_t (*workspace_bytes)(const Tensor* tensors, int64_t count);  // pure; < 0: a tensor is too large or malformed
  int64_t (*output_bytes)(int64_t count);                            // pure
  // Loads the kernels on a device: done by the first launch, or ahead of a capture, by this.
  int32_t (*prepare)(int32_t device, char* error, int64_t error_bytes);
  int32_t (*launch)(const Scan* scan, char* error, int64_t error_bytes);
  int32_t (*clear_if)(const Clear* clear, char* error, int64_t error_bytes);
};

inline TensorResult to_result(const Row& row) {
  const double root = std::sqrt(row.sumsq);
  return {row.exponent == 0 ? root : std::ldexp(root, row.exponent), row.absmax, row.nan_count, row.inf_count,
          row.first_bad};
}

}  // namespace nanscan::cuda

using NanscanCudaApi = nanscan::cuda::Api;

extern "C" const NanscanCudaApi* nanscan_cuda_api();
