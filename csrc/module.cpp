// The Python face of the engine: `nanscan._C`. pybind11 only; no framework header, no framework library.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>

#include "cpu_kernels.h"
#include "parallel.h"
#include "python_tensors.h"
#include "scaled_sum.h"
#include "scan_result.h"

#ifndef TORCH_EXTENSION_NAME  // set by torch.utils.cpp_extension
#define TORCH_EXTENSION_NAME _C
#endif

namespace py = pybind11;

namespace nanscan {
namespace {

constexpr int64_t kReleaseGilBytes = 256 * 1024;  // a shorter scan ends before another thread could use the gap

// The reads happen without the GIL where they are long; `gathered` keeps every tensor alive meanwhile.
void read_on_cpu(DeviceGroup& group, const Gathered& gathered, CpuScan& out) {
  if (gathered.bytes < kReleaseGilBytes) return scan_cpu(group.entries, gathered.layouts, group.counted, out);
  py::gil_scoped_release release;
  scan_cpu(group.entries, gathered.layouts, group.counted, out);
}

void locate_bad_elements(const Gathered& gathered, const DeviceGroup& group, CpuScan& result) {
  for (BadRow& bad : result.bad) {
    if (group.entries[bad.row].layout != Entry::kRowMajor) {
      bad.first_bad = gathered.first_bad_logical(group, static_cast<size_t>(bad.row));
    }
  }
}

// Reads everything gathered; tensors on a CUDA device go through `cuda(group index)`, which fills the segment or leaves
// it pending.
std::unique_ptr<Scan> read_all(Gathered& gathered) {
  auto scan = std::make_unique<Scan>();
  for (DeviceGroup& group : gathered.groups) {
    Segment segment;
    segment.device = group.device;
    segment.counted = std::min(group.counted, group.entries.size());
    if (group.device.device_type != dlpack::kDLCPU) throw Unserved("this device");
    read_on_cpu(group, gathered, segment.result);
    locate_bad_elements(gathered, group, segment.result);
    segment.positions = std::move(group.positions);
    scan->segments.push_back(std::move(segment));
  }
  scan->duplicates = std::move(gathered.duplicates);
  scan->resolved = std::move(gathered.resolved);
  scan->numel = gathered.numel;
  scan->signature = gathered.signature >> 1;  // fits a small Python integer's range
  scan->finish();
  return scan;
}

std::unique_ptr<Scan> scan_tensors(py::handle tensors, py::handle extra, py::object resolve) {
  Gathered gathered(std::move(resolve));
  gathered.add_tensors(tensors);
  gathered.end_of_counted();
  if (extra) gathered.add_tensors(extra);
  return read_all(gathered);
}

std::unique_ptr<Scan> scan_gradients(py::handle param_groups, py::handle extra, py::object resolve) {
  Gathered gathered(std::move(resolve));
  gathered.add_gradients_of(param_groups);
  gathered.end_of_counted();
  const uint64_t parameters = gathered.signature;  // names go by these alone: a loss is a new tensor at every step
  if (extra) gathered.add_tensors(extra);
  gathered.signature = parameters;
  return read_all(gathered);
}

// In place on plain CPU gradients. False, with nothing changed: some gradient needs the framework's own operators.
bool scale_gradients(py::handle param_groups, double factor, double limit, py::object resolve) {
  Gathered gathered(std::move(resolve));
  gathered.add_gradients_of(param_groups);
  if (!gathered.resolved.empty() || gathered.groups.size() > 1) return false;
  if (gathered.groups.empty()) return true;
  const auto& group = gathered.groups[0];
  if (group.device.device_type != dlpack::kDLCPU) return false;
  for (const Entry& e : group.entries) {
    if (!can_scale(e.type(), factor, limit)) return false;
    if (e.layout == Entry::kRowMajor) continue;
    const Layout& layout = gathered.layouts[e.layout];
    if (!layout.flat || layout.repeat != 1) return false;
  }
  py::gil_scoped_release release;
  scale_entries(group.entries, factor, limit);
  return true;
}

// What reading the gradient list costs by itself, for benchmarks: gathers, and returns the number of unique gradients.
size_t gather_only(py::handle param_groups, py::object resolve) {
  Gathered gathered(std::move(resolve));
  gathered.add_gradients_of(param_groups);
  size_t count = 0;
  for (const DeviceGroup& group : gathered.groups) count += group.entries.size();
  return count;
}

py::object row_type;  // nanscan.engine.result.Row

py::object make_row(const Scan& scan, const Segment& segment, size_t row, const BadRow* bad) {
  const int32_t position = segment.positions[row];
  py::list also;
  for (const auto& [duplicate, first] : scan.duplicates) {
    if (first == position) also.append(duplicate);
  }
  const Row& r = segment.result.rows[row];
  return row_type(position, py::tuple(also), r.finite_norm, r.absmax, bad ? bad->nan_count : 0,
                  bad ? bad->inf_count : 0, bad ? bad->first_bad : -1);
}

py::list rows_of(const Scan& scan, bool only_bad) {
  std::map<int32_t, py::object> by_position;
  for (const Segment& segment : scan.segments) {
    size_t next = 0;
    const auto& bad = segment.result.bad;
    for (size_t row = 0; row < segment.result.rows.size(); ++row) {
      const BadRow* here = next < bad.size() && bad[next].row == static_cast<int64_t>(row) ? &bad[next++] : nullptr;
      if (here != nullptr || !only_bad) by_position[segment.positions[row]] = make_row(scan, segment, row, here);
    }
  }
  py::list out;
  for (auto& [position, row] : by_position) out.append(row);
  return out;
}

}  // namespace
}  // namespace nanscan

PYBIND11_MODULE(_C, m) {
  using namespace nanscan;
  m.doc() = "The native engine of nanscan.";
  py::class_<Scan>(m, "Scan")
      .def_property_readonly("finite", [](const Scan& s) { return s.nan_count == 0 && s.inf_count == 0; })
      .def_readonly("norm", &Scan::norm)
      .def_readonly("finite_norm", &Scan::finite_norm)
      .def_readonly("inf_norm", &Scan::inf_norm)
      .def_readonly("nan_count", &Scan::nan_count)
      .def_readonly("inf_count", &Scan::inf_count)
      .def_readonly("numel", &Scan::numel)
      .def_readonly("signature", &Scan::signature)
      .def_readonly("resolved", &Scan::resolved)
      .def_property_readonly("count", &Scan::count)
      .def_property_readonly("nbytes", &Scan::nbytes)
      .def("rows", [](const Scan& s) { return rows_of(s, false); })
      .def("bad_rows", [](const Scan& s) { return rows_of(s, true); });
  py::register_exception<Unserved>(m, "Unserved");
  m.def("set_row_type", [](py::object type) { row_type = std::move(type); });
  m.def("register_tensor_type", &register_tensor_type, py::arg("type"), py::arg("strided"));
  m.def("scan", [](py::handle tensors, py::handle extra, py::object resolve) {
    return scan_tensors(tensors, extra, std::move(resolve));
  });
  m.def("scan_gradients", [](py::handle groups, py::handle extra, py::object resolve) {
    return scan_gradients(groups, extra, std::move(resolve));
  });
  m.def("scale_gradients", &scale_gradients);
  m.def("gather_only", &gather_only);
  m.def("max_threads", &max_threads);
  m.def("thread_pool", &thread_pool_name);
  m.def("instruction_set", &instruction_set);
  m.def("scratch_bytes", &scan_cpu_scratch_bytes);
  m.add_object("_row_type_cleanup", py::capsule([]() { row_type.release(); }));
}
