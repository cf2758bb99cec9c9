// Launches the kernels: argument checks, device guard, grid, stream, launch check. Built by nvcc alone, see
// scan_cuda.h.
#include <cuda_runtime.h>

#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

#include "scan_cuda_kernel.cuh"

#define NANSCAN_FIRST_OF(first, ...) first
#define NANSCAN_FIRST(...) NANSCAN_FIRST_OF(__VA_ARGS__, 0)
#if CUDART_VERSION >= 12010 && NANSCAN_FIRST(__CUDA_ARCH_LIST__) >= 700
#define NANSCAN_LARGE_PARAMS 1
#else
#define NANSCAN_LARGE_PARAMS 0  // some architecture of this build takes 4 KB only
#endif

namespace nanscan::cuda {
namespace {

using SmallScan = Params<ScanHead, kSmallBytes>;
using LargeScan = Params<ScanHead, kLargeBytes>;
using SmallClear = Params<ClearHead, kSmallBytes>;

// ---- errors --------------------------------------------------------------------------------------------------------

constexpr int32_t kBadArgument = -1;

struct Text {
  char* to;
  int64_t bytes;

  template <class... Args>
  int32_t say(int32_t code, const char* format, Args... args) const {
    if (to != nullptr && bytes > 0) std::snprintf(to, static_cast<size_t>(bytes), format, args...);
    return code;
  }

  int32_t check(cudaError_t error, const char* what, int32_t device) const {
    if (error == cudaSuccess) return 0;
    cudaGetLastError();  // ours alone: the runtime is linked in statically
    return say(error, "%s on CUDA device %d failed: %s (%s)", what, device, cudaGetErrorString(error),
               cudaGetErrorName(error));
  }
};

// ---- the current device --------------------------------------------------------------------------------------------

template <class F>
F driver_function(const char* name) {
  void* found = nullptr;
#if CUDART_VERSION >= 12050
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result) != cudaSuccess) return nullptr;
#else
  if (cudaGetDriverEntryPoint(name, &found, cudaEnableDefault) != cudaSuccess) return nullptr;
#endif
  return reinterpret_cast<F>(found);
}

// Makes a device current and afterwards what was: the driver's context, which the framework's own runtime set.
// (Asking our runtime for "its" device could name device 0 and then create a context there.)
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) {
    static const auto get = driver_function<int (*)(void**)>("cuCtxGetCurrent");
    known_ = get != nullptr && get(&before_) == 0;
    error_ = cudaSetDevice(device);
  }
  ~DeviceGuard() {
    static const auto set = driver_function<int (*)(void*)>("cuCtxSetCurrent");
    if (known_ && set != nullptr) set(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t error() const { return error_; }

 private:
  void* before_ = nullptr;
  bool known_ = false;
  cudaError_t error_;
};

// ---- what a device can run at once ---------------------------------------------------------------------------------

struct Grid {
  const void* kernel = nullptr;
  int64_t blocks = 0;  // that fit on the device together
};

struct Device {
  Grid small, large, clear;
  bool ready = false;
};

cudaError_t fill_grid(Grid& grid, const void* kernel, int64_t multiprocessors) {
  int per_multiprocessor = 0;  // the question also loads the kernel
  const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, kThreads, 0);
  if (error != cudaSuccess) return error;
  if (per_multiprocessor < 1) return cudaErrorLaunchOutOfResources;
  grid = {kernel, multiprocessors * per_multiprocessor};
  return cudaSuccess;
}

cudaError_t fill_device(Device& out, int32_t device) {
  int multiprocessors = 0, driver = 0;
  cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDriverGetVersion(&driver);
  const auto kernel_of = [](auto* f) { return reinterpret_cast<const void*>(f); };
  if (error == cudaSuccess) error = fill_grid(out.small, kernel_of(&scan_kernel<SmallScan>), multiprocessors);
  if (error == cudaSuccess) error = fill_grid(out.clear, kernel_of(&clear_kernel<SmallClear>), multiprocessors);
#if NANSCAN_LARGE_PARAMS
  if (error == cudaSuccess && driver >= 12010)
    error = fill_grid(out.large, kernel_of(&scan_kernel<LargeScan>), multiprocessors);
#endif
  out.ready = error == cudaSuccess;
  return error;
}

// Loading a kernel may allocate, which a stream that is being captured in this thread would forbid: not our concern
// here.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The device must be current. A failure is not remembered.
int32_t get_device(int32_t device, const Text& text, Device& out) {
  static std::mutex mutex;
  static std::vector<Device> devices;
  const std::lock_guard<std::mutex> lock(mutex);
  if (devices.size() <= static_cast<size_t>(device)) devices.resize(device + 1);
  Device& known = devices[device];
  if (!known.ready) {
    const RelaxedCapture relaxed;
    if (const int32_t code = text.check(fill_device(known, device), "loading the kernels", device)) return code;
  }
  out = known;
  return 0;
}

// ---- launchers -----------------------------------------------------------------------------------------------------

int32_t check_tensors(const Tensor* tensors, int64_t count, const Text& text) {
  if (count < 0 || (count > 0 && tensors == nullptr))
    return text.say(kBadArgument, "a list of %lld tensors", static_cast<long long>(count));
  for (int64_t i = 0; i < count; ++i) {
    if (const char* fault = fault_of(tensors[i]))
      return text.say(kBadArgument, "tensor %lld %s", static_cast<long long>(i), fault);
  }
  return 0;
}

int32_t check_buffer(const char* name, const void* memory, int64_t has, int64_t needs, const Text& text) {
  if (memory != nullptr && has >= needs && reinterpret_cast<uint64_t>(memory) % 16 == 0) return 0;
  return text.say(kBadArgument, "%s of %lld bytes at %p: it must have %lld bytes, aligned to 16", name,
                  static_cast<long long>(has), memory, static_cast<long long>(needs));
}

int32_t check_scan(const Scan& scan, const Text& text) {
  if (const int32_t code = check_tensors(scan.tensors, scan.count, text)) return code;
  if (scan.device < 0) return text.say(kBadArgument, "device %d", scan.device);
  if (scan.norm_count < 0 || scan.norm_count > scan.count)
    return text.say(kBadArgument, "norm_count is %lld of %lld tensors", static_cast<long long>(scan.norm_count),
                    static_cast<long long>(scan.count));
  if (!(scan.clip_norm > 0)) return text.say(kBadArgument, "clip_norm is %g; it must be positive", scan.clip_norm);
  const int64_t needs = workspace_bytes(scan.tensors, scan.count);
  if (const int32_t code = check_buffer("a workspace", scan.workspace, scan.workspace_bytes, needs, text)) return code;
  return check_buffer("an output", scan.output, scan.output_bytes, output_bytes(scan.count), text);
}

// One block for each group, but no more than fit at once: those that do take the groups in turn.
template <class P>
int32_t launch_kernel(const Grid& grid, P& params, void* stream, int32_t device, const Text& text) {
  const int64_t groups = groups_of(params.head.chunks);
  const int64_t blocks = groups < 1 ? 1 : groups < grid.blocks ? groups : grid.blocks;
  void* arguments[] = {&params};
  const cudaError_t error = cudaLaunchKernel(grid.kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                                             arguments, 0, static_cast<cudaStream_t>(stream));
  return text.check(error, "launching a kernel", device);
}

template <class P>
int32_t scan_with(const Grid& grid, const Scan& scan, const Text& text) {
  P params;
  return plan_scan(scan, params, [&](P& p) { return launch_kernel(grid, p, scan.stream, scan.device, text); });
}

// ---- entry points --------------------------------------------------------------------------------------------------

int32_t api_device_count(char* error, int64_t error_bytes) {
  const Text text{error, error_bytes};
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result == cudaSuccess && count > 0) return count;
  cudaGetLastError();
  const char* why = result == cudaSuccess ? "the driver lists none" : cudaGetErrorString(result);
  return text.say(-1, "no CUDA device: %s", why);
}

int64_t api_workspace_bytes(const Tensor* tensors, int64_t count) { return workspace_bytes(tensors, count); }

int64_t api_output_bytes(int64_t count) { return output_bytes(count); }

int32_t api_prepare(int32_t device, char* error, int64_t error_bytes) {
  const Text text{error, error_bytes};
  if (device < 0) return text.say(kBadArgument, "device %d", device);
  const DeviceGuard guard(device);
  if (const int32_t code = text.check(guard.error(), "selecting it", device)) return code;
  Device unused;
  return get_device(device, text, unused);
}

int32_t api_launch(const Scan* scan, char* error, int64_t error_bytes) {
  const Text text{error, error_bytes};
  if (const int32_t code = check_scan(*scan, text)) return code;
  const DeviceGuard guard(scan->device);
  if (const int32_t code = text.check(guard.error(), "selecting it", scan->device)) return code;
  Device device;
  if (const int32_t code = get_device(scan->device, text, device)) return code;
  const bool large = scan->count > SmallScan::kCapacity && device.large.kernel != nullptr;
  return large ? scan_with<LargeScan>(device.large, *scan, text) : scan_with<SmallScan>(device.small, *scan, text);
}

int32_t api_clear_if(const Clear* clear, char* error, int64_t error_bytes) {
  const Text text{error, error_bytes};
  if (const int32_t code = check_tensors(clear->tensors, clear->count, text)) return code;
  if (clear->device < 0) return text.say(kBadArgument, "device %d", clear->device);
  if (clear->flag == nullptr) return text.say(kBadArgument, "%s", "no flag");
  const DeviceGuard guard(clear->device);
  if (const int32_t code = text.check(guard.error(), "selecting it", clear->device)) return code;
  Device device;
  if (const int32_t code = get_device(clear->device, text, device)) return code;
  SmallClear params;
  return plan_clear(*clear, params,
                    [&](SmallClear& p) { return launch_kernel(device.clear, p, clear->stream, clear->device, text); });
}

#define NANSCAN_TEXT_OF(...) #__VA_ARGS__
#define NANSCAN_TEXT(...) NANSCAN_TEXT_OF(__VA_ARGS__)
constexpr char kBuild[] =
    "CUDA runtime " NANSCAN_TEXT(CUDART_VERSION) ", compute capabilities " NANSCAN_TEXT(__CUDA_ARCH_LIST__);

constexpr Api kApi = {kAbiVersion,      sizeof(Api), kBuild,     api_device_count, api_workspace_bytes,
                      api_output_bytes, api_prepare, api_launch, api_clear_if};

}  // namespace
}  // namespace nanscan::cuda

extern "C" __attribute__((visibility("default"))) const NanscanCudaApi* nanscan_cuda_api() {
  return &nanscan::cuda::kApi;
}
