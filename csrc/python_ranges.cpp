#include "python_ranges.h"

#include <pybind11/stl.h>

#include <array>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "python_tensors.h"
#include "range_entries.h"

namespace py = pybind11;

namespace nanscan {
namespace {

constexpr int64_t kReleaseGilBytes = 256 * 1024;  // a shorter read ends before another thread could use the gap

struct NamedType {
  DType dtype;
  const char* name;
};
constexpr std::array<NamedType, 4> kDTypes = {{{DType::Float32, "float32"},
                                               {DType::BFloat16, "bfloat16"},
                                               {DType::Float16, "float16"},
                                               {DType::Float64, "float64"}}};
size_t index_of(DType dtype) {
  size_t i = 0;
  while (kDTypes[i].dtype != dtype) ++i;
  return i;
}

// False: not on the host, of another dtype, or not served by a table.
bool read_tensor(py::handle tensor, RangeReading* out) {
  dlpack::Tensor view;
  if (!host_tensor(tensor, &view, &out->dtype, &out->numel) || !can_measure_ranges(out->dtype)) return false;
  Layout layout;
  const bool row_major = is_row_major(view.ndim, view.shape, view.strides);
  if (!row_major) layout = make_layout(view.ndim, view.shape, view.strides);
  const int64_t to_read = row_major ? out->numel : layout.numel;
  const char* data = static_cast<const char*>(view.data) + view.byte_offset;
  const auto read = [&] { return measure_ranges(out->dtype, data, to_read, row_major ? nullptr : &layout); };
  if (to_read * element_bytes(out->dtype) < kReleaseGilBytes) {
    out->ranges = read();
  } else {
    py::object alive = py::reinterpret_borrow<py::object>(tensor);
    py::gil_scoped_release release;
    out->ranges = read();
  }
  return true;
}

py::tuple numbers_of(const RangeReading& reading) {
  const Ranges& r = reading.ranges;
  return py::make_tuple(reading.numel, r.low, r.high, reading.norm(), r.zeros, r.tiny, r.nan_count, r.inf_count,
                        r.positive_infs);
}

// A call that may fail; the failure is forgotten.
py::object quietly(PyObject* result) {
  if (result == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(result);
}

struct Names {
  PyObject* version = PyUnicode_InternFromString("_version");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
  PyObject* grad_fn = PyUnicode_InternFromString("grad_fn");
  PyObject* hooks = PyUnicode_InternFromString("_backward_hooks");
  PyObject* hang = PyUnicode_InternFromString("_register_hook_dict");
  PyObject* register_hook = PyUnicode_InternFromString("register_hook");
};
const Names& names() {
  static const Names found;
  return found;
}

bool is_true(PyObject* tensor, PyObject* name) { return quietly(PyObject_GetAttr(tensor, name)).ptr() == Py_True; }

// What the hooks of a watched model share. A hook answers for plain tensors of the host; all else is left to Python.
class Meter {
 public:
  Meter(py::object type, py::object dict_type, py::object grad_enabled, py::object take_other)
      : type_(std::move(type)),
        dict_type_(std::move(dict_type)),
        grad_enabled_(std::move(grad_enabled)),
        take_other_(std::move(take_other)) {}

  void begin(py::object record, std::shared_ptr<RangeEntries> entries) {
    record_ = std::move(record);
    entries_ = std::move(entries);
  }
  void end() {
    record_ = py::none();
    entries_.reset();
  }
  void clear() { seen_.clear(); }
  void close() {
    end();
    clear();
    closed_ = true;
  }

  // True the first time that a tensor comes in this state (version). Tensors are not kept alive.
  bool is_new(py::handle tensor) {
    const py::object version = quietly(PyObject_GetAttr(tensor.ptr(), names().version));  // inference tensors have none
    const int64_t state = version ? PyLong_AsLongLong(version.ptr()) : -1;
    const auto known = seen_.find(tensor.ptr());
    if (known != seen_.end() && known->second.state == state && is_same(known->second.tensor, tensor)) return false;
    py::object reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(tensor.ptr(), nullptr));
    if (!reference) throw py::error_already_set();
    seen_[tensor.ptr()] = {std::move(reference), state};
    return true;
  }

  // False: Python has to look at it.
  bool take(const std::shared_ptr<Meter>& self, int32_t row, PyObject* output) {
    if (!entries_ || !is_plain(output) || quietly(PyObject_CallNoArgs(grad_enabled_.ptr())).ptr() != Py_True) {
      return false;
    }
    const bool differentiable = is_true(output, names().requires_grad);
    py::object node;
    if (differentiable) {
      node = quietly(PyObject_GetAttr(output, names().grad_fn));
      if (!node || node.is_none()) return false;
    }
    dlpack::Tensor view;
    RangeReading reading;
    if (!host_tensor(output, &view, &reading.dtype, &reading.numel) || !can_measure_ranges(reading.dtype)) return false;
    if (reading.numel == 0 || !is_new(output)) return true;
    auto entries = entries_;
    if (!read_tensor(output, &reading)) return true;
    entries->add(row, reading);
    if (differentiable) hang(self, entries, row + 1, output, node.ptr());
    return true;
  }

  void take_gradient(RangeEntries& entries, py::handle record, int32_t row, PyObject* grad) {
    if (closed_) return;
    RangeReading reading;
    if (!is_plain(grad) || !read_tensor(grad, &reading)) {
      take_other_(record, row, py::handle(grad));
    } else if (reading.numel != 0) {
      entries.add(row, reading);
    }
  }

 private:
  struct Known {
    py::object tensor;  // a weak reference
    int64_t state;
  };

  static bool is_same(const py::object& reference, py::handle tensor) {
    return quietly(PyObject_CallNoArgs(reference.ptr())).ptr() == tensor.ptr();
  }

  // A negated view has the sign of its elements elsewhere.
  bool is_plain(PyObject* object) const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != type_.ptr()) return false;
    return quietly(PyObject_CallMethodNoArgs(object, names().is_neg)).ptr() == Py_False;
  }

  void hang(const std::shared_ptr<Meter>& self, const std::shared_ptr<RangeEntries>& entries, int32_t row,
            PyObject* tensor, PyObject* node);

  py::object type_, dict_type_, grad_enabled_, take_other_;
  py::object record_ = py::none();         // of the step whose forward runs
  std::shared_ptr<RangeEntries> entries_;  // its
  std::unordered_map<PyObject*, Known> seen_;
  bool closed_ = false;
};

// A Python function of one argument with a C++ object behind it: no way from Python to C++ is shorter.
template <typename Hook>
py::object make_function(std::unique_ptr<Hook> hook) {
  static PyMethodDef definition = {Hook::kName,
                                   [](PyObject* self, PyObject* argument) -> PyObject* {
                                     try {
                                       return (*static_cast<Hook*>(PyCapsule_GetPointer(self, nullptr)))(argument);
                                     } catch (py::error_already_set& error) {
                                       error.restore();
                                     } catch (const std::exception& error) {
                                       PyErr_SetString(PyExc_RuntimeError, error.what());
                                     }
                                     return nullptr;
                                   },
                                   METH_O, nullptr};
  py::capsule self(hook.release(), [](void* pointer) { delete static_cast<Hook*>(pointer); });
  py::object function = py::reinterpret_steal<py::object>(PyCFunction_New(&definition, self.ptr()));
  if (!function) throw py::error_already_set();
  return function;
}

struct ModuleHook {
  static constexpr const char* kName = "take";
  std::shared_ptr<Meter> meter;
  int32_t row;

  PyObject* operator()(PyObject* output) const { return py::bool_(meter->take(meter, row, output)).release().ptr(); }
};

struct GradientHook {
  static constexpr const char* kName = "take_gradient";
  std::shared_ptr<Meter> meter;
  std::shared_ptr<RangeEntries> entries;
  py::object record;
  int32_t row;

  PyObject* operator()(PyObject* grad) const {
    meter->take_gradient(*entries, record, row, grad);
    Py_RETURN_NONE;
  }
};

// As Tensor.register_hook does, without its way through Python. No handle: the hook goes with the graph.
void Meter::hang(const std::shared_ptr<Meter>& self, const std::shared_ptr<RangeEntries>& entries, int32_t row,
                 PyObject* tensor, PyObject* node) {
  const Names& n = names();
  const py::object hook = make_function(std::unique_ptr<GradientHook>(new GradientHook{self, entries, record_, row}));
  py::object hooks = quietly(PyObject_GetAttr(tensor, n.hooks));
  if (hooks && hooks.is_none()) {
    hooks = dict_type_();
    const bool hung =
        PyObject_SetAttr(tensor, n.hooks, hooks.ptr()) == 0 && quietly(PyObject_CallMethodOneArg(node, n.hang, tensor));
    if (!hung) {
      PyErr_Clear();
      if (PyObject_SetAttr(tensor, n.hooks, Py_None) != 0) PyErr_Clear();
      hooks = py::object();
    }
  }
  if (hooks) {
    if (PyObject_SetItem(hooks.ptr(), hook.ptr(), hook.ptr()) != 0) throw py::error_already_set();
  } else {
    py::handle(tensor).attr(py::handle(n.register_hook))(hook);
  }
}

py::list take_items(RangeEntries& entries) {
  py::list out;
  for (size_t i = 0; i < entries.items.size(); ++i) {
    const auto& [row, reading] = entries.items[i];
    out.append(py::make_tuple(row, numbers_of(reading), kDTypes[index_of(reading.dtype)].name, i >= entries.judged));
  }
  entries.items.clear();
  entries.judged = 0;
  entries.any_inf = false;
  return out;
}

// ([row], [rms]) of what was not judged yet, which then is; None: a row has several tensors, or leaves its bound.
py::object judge_items(RangeEntries& entries, const std::map<std::string, double>& bounds) {
  std::array<double, kDTypes.size()> bound;
  for (size_t i = 0; i < kDTypes.size(); ++i) bound[i] = bounds.at(kDTypes[i].name);
  const auto bound_of = [&](DType dtype) { return bound[index_of(dtype)]; };
  if (!entries.rows_differ() || !entries.fresh_within(bound_of)) return py::none();
  py::list rows, rms;
  for (; entries.judged < entries.items.size(); ++entries.judged) {
    const auto& item = entries.items[entries.judged];
    rows.append(item.row);
    rms.append(item.reading.rms());
  }
  return py::make_tuple(rows, rms);
}

}  // namespace

py::object ranges_of(py::handle tensor) {
  RangeReading reading;
  return read_tensor(tensor, &reading) ? py::object(numbers_of(reading)) : py::none();
}

void define_range_meter(py::module_& m) {
  py::class_<RangeEntries, std::shared_ptr<RangeEntries>>(m, "RangeEntries")
      .def_property_readonly("fresh", [](const RangeEntries& e) { return e.items.size() - e.judged; })
      .def_readonly("any_inf", &RangeEntries::any_inf)
      .def("take", &take_items)
      .def("judge", &judge_items);
  py::class_<Meter, std::shared_ptr<Meter>>(m, "RangeMeter")
      .def(py::init<py::object, py::object, py::object, py::object>())
      .def("entries", [](const Meter&) { return std::make_shared<RangeEntries>(); })
      .def("begin", &Meter::begin)
      .def("end", &Meter::end)
      .def("close", &Meter::close)
      .def("clear", &Meter::clear)
      .def("is_new", &Meter::is_new)
      .def("hook", [](const std::shared_ptr<Meter>& meter, int32_t row) {
        return make_function(std::unique_ptr<ModuleHook>(new ModuleHook{meter, row}));
      });
}

}  // namespace nanscan
