#include "range_meter.h"

#include <utility>

#include "python_function.h"
#include "python_ranges.h"
#include "python_tensors.h"

namespace py = pybind11;

namespace nanscan {
namespace {

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

bool is_same(const py::object& reference, py::handle tensor) {
  return quietly(PyObject_CallNoArgs(reference.ptr())).ptr() == tensor.ptr();
}

struct ModuleHook {
  static constexpr const char* kName = "take";
  std::shared_ptr<RangeMeter> meter;
  int32_t row;

  PyObject* operator()(PyObject* output) const { return PyBool_FromLong(meter->take(row, output)); }
};

struct GradientHook {
  static constexpr const char* kName = "take_gradient";
  std::shared_ptr<RangeMeter> meter;
  std::shared_ptr<RangeEntries> entries;
  py::object record;
  int32_t row;

  PyObject* operator()(PyObject* grad) const {
    meter->take_gradient(*entries, record, row, grad);
    Py_RETURN_NONE;
  }
};

}  // namespace

RangeMeter::RangeMeter(py::object type, py::object dict_type, py::object grad_enabled, py::object take_other)
    : type_(std::move(type)),
      dict_type_(std::move(dict_type)),
      grad_enabled_(std::move(grad_enabled)),
      take_other_(std::move(take_other)) {}

void RangeMeter::begin(py::object record, std::shared_ptr<RangeEntries> entries) {
  record_ = std::move(record);
  entries_ = std::move(entries);
}

void RangeMeter::end() {
  record_ = py::none();
  entries_.reset();
}

void RangeMeter::close() {
  end();
  clear();
  closed_ = true;
}

bool RangeMeter::is_new(py::handle tensor) {
  const py::object version = quietly(PyObject_GetAttr(tensor.ptr(), names().version));  // inference tensors have none
  const int64_t state = version ? PyLong_AsLongLong(version.ptr()) : -1;
  const auto known = seen_.find(tensor.ptr());
  if (known != seen_.end() && known->second.state == state && is_same(known->second.tensor, tensor)) return false;
  py::object reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(tensor.ptr(), nullptr));
  if (!reference) throw py::error_already_set();
  seen_[tensor.ptr()] = {std::move(reference), state};
  return true;
}

bool RangeMeter::take(int32_t row, PyObject* output) {
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
  if (!read_ranges_of(output, &reading)) return true;
  entries->add(row, reading);
  if (differentiable) hang(entries, row + 1, output, node.ptr());
  return true;
}

void RangeMeter::take_gradient(RangeEntries& entries, py::handle record, int32_t row, PyObject* grad) {
  if (closed_) return;
  RangeReading reading;
  if (!is_plain(grad) || !read_ranges_of(grad, &reading)) {
    call(take_other_, {borrowed(record), py::int_(row), borrowed(grad)});
  } else if (reading.numel != 0) {
    entries.add(row, reading);
  }
}

// A negated view has the sign of its elements elsewhere.
bool RangeMeter::is_plain(PyObject* object) const {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != type_.ptr()) return false;
  return quietly(PyObject_CallMethodNoArgs(object, names().is_neg)).ptr() == Py_False;
}

// As Tensor.register_hook does, without its way through Python. No handle: the hook goes with the graph.
void RangeMeter::hang(const std::shared_ptr<RangeEntries>& entries, int32_t row, PyObject* tensor, PyObject* node) {
  const Names& n = names();
  const py::object hook =
      make_function(std::unique_ptr<GradientHook>(new GradientHook{shared_from_this(), entries, record_, row}));
  py::object hooks = quietly(PyObject_GetAttr(tensor, n.hooks));
  if (hooks && hooks.is_none()) {
    hooks = call(dict_type_, {});
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
    call(py::handle(tensor).attr(py::handle(n.register_hook)), {hook});
  }
}

py::object RangeMeter::hook(int32_t row) {
  return make_function(std::unique_ptr<ModuleHook>(new ModuleHook{shared_from_this(), row}));
}

}  // namespace nanscan
