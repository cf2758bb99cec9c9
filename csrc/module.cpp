// The Python face of the engine: `nanscan._C`. The one file that includes pybind11.h; no framework header or library.
#pragma GCC optimize("O1")  // it only hands on: a third less to compile, and no call is measurably slower
#include <pybind11/pybind11.h>

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
#include "python_scan.h"
#include "python_tensors.h"
#include "python_types.h"
#include "range_meter.h"
#include "scan_cuda.h"

#ifndef TORCH_EXTENSION_NAME  // set by torch.utils.cpp_extension
#define TORCH_EXTENSION_NAME _C
#endif

namespace py = pybind11;

template std::string py::handle::cast<std::string>() const;  // the other files' errors need it, and don't see its body

namespace nanscan {
namespace {

void define_scan(py::module_& m) {
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
      .def_property_readonly("resolved", &PythonScan::resolved_as_list)
      .def_property_readonly("count", &PythonScan::count)
      .def_property_readonly("device_count", [](const PythonScan& s) { return s.segments.size(); })
      .def_property_readonly("nbytes", &PythonScan::nbytes)
      .def_property_readonly("outputs", &PythonScan::outputs_as_list)
      .def("fill", &PythonScan::fill)
      .def("rows", &PythonScan::rows, py::arg("only_bad") = false)
      .def("bad_rows", [](const PythonScan& s) { return s.rows(true); });
  py::register_exception<Unserved>(m, "Unserved");
  m.def("set_row_type", &set_row_type);
  m.def("register_tensor_type", &register_tensor_type, py::arg("type"), py::arg("strided"), py::arg("dense") = "");
  m.def("learn_shortcuts", &learn_shortcuts);
  m.def("scan", &scan_tensors);
  m.def("scan_gradients", &scan_gradients);
  m.def("gather_only", &gather_only);
  m.def("clear_gradients_if", &clear_gradients_if);
  m.def("scale_gradients", &scale_gradients);
  m.def("scale_tensors", &scale_tensors);
  m.add_object("_row_type_cleanup", py::capsule([]() { forget_row_type(); }));
}

void define_ranges(py::module_& m) {
  m.def("measure_ranges", &ranges_of);
  py::class_<RangeEntries, std::shared_ptr<RangeEntries>>(m, "RangeEntries")
      .def_property_readonly("fresh", [](const RangeEntries& e) { return e.items.size() - e.judged; })
      .def_readonly("any_inf", &RangeEntries::any_inf)
      .def("take", &take_items)
      .def("judge", &judge_items);
  py::class_<RangeMeter, std::shared_ptr<RangeMeter>>(m, "RangeMeter")
      .def(py::init<py::object, py::object, py::object, py::object>())
      .def("entries", [](const RangeMeter&) { return std::make_shared<RangeEntries>(); })
      .def("begin", &RangeMeter::begin)
      .def("end", &RangeMeter::end)
      .def("close", &RangeMeter::close)
      .def("clear", &RangeMeter::clear)
      .def("is_new", &RangeMeter::is_new)
      .def("hook", &RangeMeter::hook)
      .def("watched_call", &RangeMeter::watched_call);
}

void define_cuda(py::module_& m) {
  m.def("load_cuda", &load_cuda);
  m.def("prepare_cuda", &prepare_cuda);
  m.def("cuda_build", &cuda_build);
  m.attr("FOUND_INF_OFFSET") = cuda::kFoundInfOffset;
  m.attr("GRAD_SCALE_OFFSET") = cuda::kGradScaleOffset;
}

void define_copies(py::module_& m) {
  m.def("copy_tensors", &copy_tensors);
  m.def("plan_copies", &plan_copies);
  m.def("copy_planned", &copy_planned);
  m.def("layouts_of", &layouts_of);
  m.def("rebuild", &rebuild);
}

}  // namespace
}  // namespace nanscan

PYBIND11_MODULE(_C, m) {
  using namespace nanscan;
  m.doc() = "The native engine of nanscan.";
  define_scan(m);
  define_ranges(m);
  define_cuda(m);
  define_copies(m);
  m.def("batch_check", &make_batch_check, py::arg("batch"), py::arg("floats"), py::arg("within"), py::arg("masks"),
        py::arg("varying"));
  m.def("max_threads", &max_threads);
  m.def("thread_pool", &thread_pool_name);
  m.def("instruction_set", &instruction_set);
  m.def("scratch_bytes", &scan_cpu_scratch_bytes);
}
