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
#include "cuda_bridge.h"
#include "parallel.h"
#include "python_batch.h"
#include "python_copy.h"
#include "python_layouts.h"
#include "python_ranges.h"
#include "python_rebuild.h"
#include "python_tensors.h"
#include "scaled_sum.h"
#include "scan_cuda.h"
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

// A scan whose CUDA parts may still be on their way: the output tensor of each, until `fill` has read it.
struct PythonScan : Scan {
  std::vector<std::pair<size_t, py::object>> outputs;

  void fill(py::list on_host) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      py::object host = on_host[i];
      const auto bytes = host.attr("numel")().cast<size_t>();
      fill_from_output(segments[outputs[i].first], data_pointer(host), bytes);
      outputs[i].second = py::none();  // a history of answers must not hold the device's memory
    }
    finish();
  }
};

void remember_permuted(const Gathered& gathered, const DeviceGroup& group, Segment& segment) {
  for (size_t i = 0; i < group.entries.size(); ++i) {
    if (group.entries[i].layout == Entry::kRowMajor) continue;
    Permuted permuted{i, {}, {}};
    gathered.shape_of(group, i, &permuted.shape, &permuted.strides);
    segment.permuted.push_back(std::move(permuted));
  }
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
  scan->signature = gathered.signature >> 1;  // fits a Python integer's fast range
  scan->finish();
  return scan;
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

// True: the gradients are cleared on their CUDA device where the flag says so. False: the framework has to do it.
bool clear_gradients_if(py::handle param_groups, py::handle flag, py::object resolve) {
  Gathered gathered(std::move(resolve));
  gathered.add_gradients_of(param_groups);
  return clear_on_cuda(gathered, flag);
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
  py::gil_scoped_release release;
  scale_entries(group.entries, factor, limit);
  return true;
}

bool scale_gradients(py::handle param_groups, double factor, double limit, py::object resolve) {
  Gathered gathered(std::move(resolve));
  gathered.add_gradients_of(param_groups);
  return !gathered.any_requires_grad() && scale_gathered(gathered, factor, limit);
}

// For tensors that autograd does not follow.
bool scale_tensors(py::handle tensors, double factor, double limit, py::object resolve) {
  Gathered gathered(std::move(resolve));
  gathered.add_tensors(tensors);
  return scale_gathered(gathered, factor, limit);
}

// Copies each source into its target. Returns whether all that was copied is finite, and which pairs were left to the
// framework.
py::tuple copy_tensors(const py::list& sources, const py::list& targets) {
  if (sources.size() != targets.size()) throw std::invalid_argument("as many targets as sources are needed");
  std::vector<CopyJob> jobs;
  py::list left;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (!add_copy(sources[i], targets[i], &jobs)) left.append(i);
  }
  bool finite;
  {
    py::gil_scoped_release release;
    finite = copy_finite(jobs);
  }
  return py::make_tuple(finite, left);
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
  py::class_<PythonScan>(m, "Scan")
      .def_property_readonly("finite", [](const PythonScan& s) { return s.nan_count == 0 && s.inf_count == 0; })
      .def_readonly("norm", &PythonScan::norm)
      .def_readonly("finite_norm", &PythonScan::finite_norm)
      .def_readonly("inf_norm", &PythonScan::inf_norm)
      .def_readonly("nan_count", &PythonScan::nan_count)
      .def_readonly("inf_count", &PythonScan::inf_count)
      .def_readonly("numel", &PythonScan::numel)
      .def_readonly("signature", &PythonScan::signature)
      .def_readonly("row_major", &PythonScan::row_major)
      .def_readonly("separate", &PythonScan::separate)
      .def_readonly("resolved", &PythonScan::resolved)
      .def_property_readonly("count", [](const PythonScan& s) { return s.count(); })
      .def_property_readonly("device_count", [](const PythonScan& s) { return s.segments.size(); })
      .def_property_readonly("nbytes", [](const PythonScan& s) { return s.nbytes(); })
      .def_property_readonly("outputs",
                             [](const PythonScan& s) {
                               py::list out;
                               for (const auto& [segment, output] : s.outputs) out.append(output);
                               return out;
                             })
      .def("fill", &PythonScan::fill)
      .def("rows", [](const PythonScan& s) { return rows_of(s, false); })
      .def("bad_rows", [](const PythonScan& s) { return rows_of(s, true); });
  py::register_exception<Unserved>(m, "Unserved");
  m.def("set_row_type", [](py::object type) { row_type = std::move(type); });
  m.def("register_tensor_type", &register_tensor_type, py::arg("type"), py::arg("strided"), py::arg("dense") = "");
  m.def("scan", &scan_tensors);
  m.def("scan_gradients", &scan_gradients);
  m.def("measure_ranges", &ranges_of);
  define_range_meter(m);
  m.def("clear_gradients_if", &clear_gradients_if);
  m.def("load_cuda", &load_cuda);
  m.def("prepare_cuda", &prepare_cuda);
  m.attr("FOUND_INF_OFFSET") = cuda::kFoundInfOffset;
  m.attr("GRAD_SCALE_OFFSET") = cuda::kGradScaleOffset;
  m.def("cuda_build", &cuda_build);
  m.def("scale_gradients", &scale_gradients);
  m.def("scale_tensors", &scale_tensors);
  m.def("copy_tensors", &copy_tensors);
  m.def("plan_copies", &plan_copies);
  m.def("copy_planned", &copy_planned);
  m.def("layouts_of", &layouts_of);
  m.def("rebuild", &rebuild);
  bind_batch_check(m);
  m.def("gather_only", &gather_only);
  m.def("max_threads", &max_threads);
  m.def("thread_pool", &thread_pool_name);
  m.def("instruction_set", &instruction_set);
  m.def("scratch_bytes", &scan_cpu_scratch_bytes);
  m.add_object("_row_type_cleanup", py::capsule([]() { row_type.release(); }));
}
