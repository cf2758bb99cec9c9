#include "python_scan.h"

#include <algorithm>
#include <limits>
#include <map>

#include "cpu_kernels.h"
#include "cuda_bridge.h"
#include "python_tensors.h"

namespace py = pybind11;

namespace nanscan {
namespace {

// The reads happen without the GIL where they are long; `gathered` keeps every tensor alive meanwhile.
void read_on_cpu(DeviceGroup& group, const Gathered& gathered, CpuScan& out) {
  if (gathered.bytes < kReleaseGilBytes) return scan_cpu(group.entries, gathered.layouts, group.counted, out);
  ReleaseGil release;
  scan_cpu(group.entries, gathered.layouts, group.counted, out);
}

void locate_bad_elements(const Gathered& gathered, const DeviceGroup& group, CpuScan& result) {
  for (BadRow& bad : result.bad) {
    if (group.entries[bad.row].layout != Entry::kRowMajor) {
      bad.first_bad = gathered.first_bad_logical(group, static_cast<size_t>(bad.row));
    }
  }
}

void remember_permuted(const Gathered& gathered, const DeviceGroup& group, Segment& segment) {
  for (size_t i = 0; i < group.entries.size(); ++i) {
    if (group.entries[i].layout == Entry::kRowMajor) continue;
    Permuted permuted{i, {}, {}};
    gathered.shape_of(group, i, &permuted.shape, &permuted.strides);
    segment.permuted.push_back(std::move(permuted));
  }
}

// What a signature owes to where the counted tensors lie: nothing on the host, so that a move is seen in it.
uint64_t places_of(const Scan& scan) {
  uint64_t places = 0;
  for (const Segment& s : scan.segments) {
    if (s.counted == 0 || s.device.device_type == dlpack::kDLCPU) continue;
    places = places * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(s.device.device_id + 1) * 0xbf58476d1ce4e5b9ull;
  }
  return places;
}

// Reads everything gathered: the CPU's tensors now; those of a CUDA device are queued there.
std::unique_ptr<PythonScan> read_all(Gathered& gathered, const CudaRequest& request) {
  auto scan = std::make_unique<PythonScan>();
  for (DeviceGroup& group : gathered.groups) {
    Segment segment;
    segment.device = group.device;
    segment.counted = std::min(group.counted, group.entries.size());
    if (group.device.device_type == dlpack::kDLCPU) {
      read_on_cpu(group, gathered, segment.result);
      locate_bad_elements(gathered, group, segment.result);
    } else if (request.hooks.is_none()) {  // nobody who could allocate the output there
      throw Unserved("a CUDA device, for a framework whose allocator is not known here");
    } else {
      scan->outputs.emplace_back(scan->segments.size(), launch_on_cuda(group, gathered, request));
      remember_permuted(gathered, group, segment);
    }
    segment.positions = std::move(group.positions);
    scan->segments.push_back(std::move(segment));
  }
  scan->row_major = gathered.layouts.empty() && gathered.resolved.empty();
  scan->separate = gathered.all_separate();
  scan->duplicates = std::move(gathered.duplicates);
  scan->resolved = std::move(gathered.resolved);
  scan->numel = gathered.numel;
  scan->signature = (gathered.signature ^ places_of(*scan)) >> 1;  // fits a Python integer's fast range
  scan->finish();
  return scan;
}

// In place on plain CPU memory. False, with nothing changed: some tensor needs the framework's own operators.
bool scale_gathered(const Gathered& gathered, double factor, double limit) {
  if (gathered.groups.empty()) return true;
  if (!gathered.resolved.empty() || gathered.groups.size() > 1) return false;
  const auto& group = gathered.groups[0];
  if (group.device.device_type != dlpack::kDLCPU) return false;
  for (const Entry& e : group.entries) {
    if (!can_scale(e.type(), factor, limit) || reinterpret_cast<uintptr_t>(e.data) % element_bytes(e.type()))
      return false;
    if (e.layout == Entry::kRowMajor) continue;
    const Layout& layout = gathered.layouts[e.layout];
    if (!layout.flat || layout.repeat != 1) return false;
  }
  ReleaseGil release;
  scale_entries(group.entries, factor, limit);
  return true;
}

py::object row_type;  // nanscan.engine.result.Row

py::object make_row(const Scan& scan, const Segment& segment, size_t row, const BadRow* bad) {
  const int32_t position = segment.positions[row];
  py::list also;
  for (const auto& [duplicate, first] : scan.duplicates) {
    if (first == position) also.append(py::int_(duplicate));
  }
  const Row& r = segment.result.rows[row];
  return call(row_type, {py::int_(position), py::tuple(also), py::float_(r.finite_norm), py::float_(r.absmax),
                         py::int_(bad ? bad->nan_count : 0), py::int_(bad ? bad->inf_count : 0),
                         py::int_(bad ? bad->first_bad : -1)});
}

}  // namespace

void set_row_type(py::object type) { row_type = std::move(type); }
void forget_row_type() { row_type.release(); }

void PythonScan::fill(const py::list& on_host) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    py::object host = on_host[i];
    const py::int_ bytes(call(host.attr("numel"), {}));
    fill_from_output(segments[outputs[i].first], data_pointer(host), static_cast<size_t>(bytes));
    outputs[i].second = py::none();  // a history of answers must not hold the device's memory
  }
  finish();
}

py::list PythonScan::outputs_as_list() const {
  py::list out;
  for (const auto& [segment, output] : outputs) out.append(output);
  return out;
}

py::list PythonScan::resolved_as_list() const {
  py::list out;
  for (const int32_t position : resolved) out.append(py::int_(position));
  return out;
}

py::list PythonScan::rows(bool only_bad) const {
  std::map<int32_t, py::object> by_position;
  for (const Segment& segment : segments) {
    size_t next = 0;
    const auto& bad = segment.result.bad;
    for (size_t row = 0; row < segment.result.rows.size(); ++row) {
      const BadRow* here = next < bad.size() && bad[next].row == static_cast<int64_t>(row) ? &bad[next++] : nullptr;
      if (here != nullptr || !only_bad) by_position[segment.positions[row]] = make_row(*this, segment, row, here);
    }
  }
  py::list out;
  for (auto& [position, row] : by_position) out.append(row);
  return out;
}

std::unique_ptr<PythonScan> scan_tensors(py::handle tensors, py::handle extra, py::object resolve, py::object hooks) {
  Gathered gathered(std::move(resolve));
  gathered.add_tensors(tensors);
  gathered.end_of_counted();
  gathered.add_tensors(extra);
  return read_all(gathered, {std::move(hooks), std::numeric_limits<double>::infinity(), py::none(), py::none()});
}

std::unique_ptr<PythonScan> scan_gradients(py::handle param_groups, py::handle extra, py::object resolve,
                                           py::object hooks, double clip_norm, py::object grad_scale,
                                           py::object found_inf) {
  Gathered gathered(std::move(resolve));
  gathered.add_gradients_of(param_groups);
  gathered.end_of_counted();
  const uint64_t parameters = gathered.signature;  // names go by these alone: a loss is a new tensor at every step
  gathered.add_tensors(extra);
  gathered.signature = parameters;
  return read_all(gathered, {std::move(hooks), clip_norm, std::move(grad_scale), std::move(found_inf)});
}

bool clear_gradients_if(py::handle param_groups, py::handle flag, py::object resolve) {
  Gathered gathered(std::move(resolve));
  gathered.add_gradients_of(param_groups);
  return clear_on_cuda(gathered, flag);
}

bool scale_gradients(py::handle param_groups, double factor, double limit, py::object resolve) {
  Gathered gathered(std::move(resolve));
  gathered.add_gradients_of(param_groups);
  return !gathered.any_requires_grad() && scale_gathered(gathered, factor, limit);
}

bool scale_tensors(py::handle tensors, double factor, double limit, py::object resolve) {
  Gathered gathered(std::move(resolve));
  gathered.add_tensors(tensors);
  return scale_gathered(gathered, factor, limit);
}

size_t gather_only(py::handle param_groups, py::object resolve) {
  Gathered gathered(std::move(resolve));
  gathered.add_gradients_of(param_groups);
  size_t count = 0;
  for (const DeviceGroup& group : gathered.groups) count += group.entries.size();
  return count;
}

}  // namespace nanscan
