#include "cuda_bridge.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "scaled_sum.h"
#include "scan_cuda.h"

namespace py = pybind11;

namespace nanscan {
namespace {

const cuda::Api* api = nullptr;

void check(int32_t code, const char* error) {
  if (code != 0) throw std::runtime_error(std::string("the CUDA scan failed: ") + error);
}

const float* flag_pointer(py::handle flag) {
  return flag.is_none() ? nullptr : static_cast<const float*>(data_pointer(flag));
}

// The flag as the kernel reads it: on its device, float32. It may come from any other.
py::object flag_on(int32_t device, const py::object& flag, py::handle hooks) {
  return flag.is_none() ? flag : call(hooks.attr("flag"), {py::int_(device), flag});
}

bool serves(py::handle hooks, int32_t device) { return py::bool_(call(hooks.attr("serves"), {py::int_(device)})); }

bool is_dense(const Entry& entry, const Gathered& gathered) {
  if (entry.layout == Entry::kRowMajor) return true;
  const Layout& layout = gathered.layouts[entry.layout];
  return layout.flat && layout.repeat == 1;
}

// The tensors as dense memory. A tensor that is not dense is replaced by a copy, which the group then owns.
std::vector<cuda::Tensor> dense_tensors(DeviceGroup& group, const Gathered& gathered, py::handle hooks) {
  std::vector<cuda::Tensor> tensors;
  tensors.reserve(group.entries.size());
  for (size_t i = 0; i < group.entries.size(); ++i) {
    Entry& entry = group.entries[i];
    if (!is_dense(entry, gathered)) {
      const Layout& layout = gathered.layouts[entry.layout];
      py::object copy = call(hooks.attr("dense"), {borrowed(group.owners[i])});
      entry.data = static_cast<const char*>(data_pointer(copy));
      entry.numel = layout.numel * layout.repeat;
      entry.layout = Entry::kRowMajor;
      Py_DECREF(group.owners[i]);
      group.owners[i] = copy.release().ptr();
    }
    tensors.push_back({entry.data, entry.numel, entry.type(), 0});
  }
  return tensors;
}

}  // namespace

void load_cuda(const std::string& path) {
  if (api != nullptr) return;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  auto get = reinterpret_cast<const cuda::Api* (*)()>(dlsym(library, "nanscan_cuda_api"));
  const cuda::Api* found = get != nullptr ? get() : nullptr;
  if (found == nullptr || found->abi_version != cuda::kAbiVersion || found->struct_bytes != sizeof(cuda::Api)) {
    dlclose(library);
    throw std::runtime_error(path + " was built from other sources than this engine");
  }
  api = found;
}

void prepare_cuda(int32_t device) {
  char error[512] = "the library is not loaded";
  if (api == nullptr || api->prepare(device, error, sizeof(error)) != 0) throw std::runtime_error(error);
}

bool cuda_loaded() { return api != nullptr; }
std::string cuda_build() { return api != nullptr ? api->build : ""; }

py::object launch_on_cuda(DeviceGroup& group, const Gathered& gathered, const CudaRequest& request) {
  const int32_t device = group.device.device_id;
  if (request.hooks.is_none() || !serves(request.hooks, device) || api == nullptr) {
    throw Unserved("CUDA tensors without the CUDA library");
  }
  const std::vector<cuda::Tensor> tensors = dense_tensors(group, gathered, request.hooks);
  const auto count = static_cast<int64_t>(tensors.size());
  const int64_t workspace_bytes = api->workspace_bytes(tensors.data(), count), output_bytes = api->output_bytes(count);
  if (workspace_bytes < 0 || output_bytes < 0) throw Unserved("a tensor beyond the CUDA library's limits");
  const py::object grad_scale = flag_on(device, request.grad_scale, request.hooks);
  const py::object found_inf = flag_on(device, request.found_inf, request.hooks);
  void* stream = current_stream(group.device);
  py::object output = call(request.hooks.attr("allocate"), {py::int_(device), py::int_(output_bytes)});
  py::object workspace =
      call(request.hooks.attr("workspace"),
           {py::int_(device), py::int_(reinterpret_cast<uintptr_t>(stream)), py::int_(workspace_bytes)});
  cuda::Scan scan{};
  scan.tensors = tensors.data();
  scan.count = count;
  scan.norm_count = static_cast<int64_t>(std::min(group.counted, group.entries.size()));
  scan.workspace = data_pointer(workspace);
  scan.workspace_bytes = workspace_bytes;
  scan.output = data_pointer(output);
  scan.output_bytes = output_bytes;
  scan.grad_scale = flag_pointer(grad_scale);
  scan.found_inf = flag_pointer(found_inf);
  scan.clip_norm = request.clip_norm;
  scan.stream = stream;
  scan.device = device;
  char error[512] = "";
  check(api->launch(&scan, error, sizeof(error)), error);
  return output;
}

void fill_from_output(Segment& segment, const void* host, size_t bytes) {
  const size_t rows = segment.positions.size();
  if (bytes < cuda::kRowsOffset + rows * sizeof(cuda::Row)) throw std::invalid_argument("the output is cut short");
  const auto* row = reinterpret_cast<const cuda::Row*>(static_cast<const char*>(host) + cuda::kRowsOffset);
  segment.result = {};
  segment.result.rows.reserve(rows);
  for (size_t i = 0; i < rows; ++i, ++row) {
    const TensorResult result = cuda::to_result(*row);
    segment.result.rows.push_back({result.finite_norm, result.absmax});
    Totals& totals = segment.result.totals;
    totals.nan_count += result.nan_count;
    totals.inf_count += result.inf_count;
    if (result.first_bad >= 0) {
      const int64_t first = segment.logical_index(i, result.first_bad);
      segment.result.bad.push_back({static_cast<int64_t>(i), result.nan_count, result.inf_count, first});
    }
    if (i >= segment.counted) continue;
    add_scaled(totals.sum, {row->sumsq, row->exponent});
    totals.absmax = std::max(totals.absmax, result.absmax);
  }
}

bool clear_on_cuda(const Gathered& gathered, py::handle flag) {
  if (api == nullptr) return false;
  const bool all_dense = std::all_of(gathered.groups.begin(), gathered.groups.end(), [&](const DeviceGroup& g) {
    return std::all_of(g.entries.begin(), g.entries.end(), [&](const Entry& e) { return is_dense(e, gathered); });
  });
  if (gathered.groups.empty()) return true;
  if (!all_dense || !gathered.resolved.empty() || gathered.groups.size() != 1) return false;
  const DeviceGroup& group = gathered.groups[0];
  if (group.device.device_type != dlpack::kDLCUDA) return false;
  std::vector<cuda::Tensor> tensors;
  for (const Entry& e : group.entries) tensors.push_back({e.data, e.numel, e.type(), 0});
  cuda::Clear clear{};
  clear.tensors = tensors.data();
  clear.count = static_cast<int64_t>(tensors.size());
  clear.flag = flag_pointer(flag);
  clear.stream = current_stream(group.device);
  clear.device = group.device.device_id;
  char error[512] = "";
  check(api->clear_if(&clear, error, sizeof(error)), error);
  return true;
}

}  // namespace nanscan
