#include "range_meter.h"

#include <utility>

#include "python_function.h"
#include "python_ranges.h"
#include "python_tensors.h"
#include "watched_call.h"

namespace py = pybind11;

namespace nanscan {
namespace {

struct Names {
  PyObject* touched = PyUnicode_InternFromString("touched");
  PyObject* hooks = PyUnicode_InternFromString("_backward_hooks");
  PyObject* hang = PyUnicode_InternFromString("_register_hook_dict");
  PyObject* register_hook = PyUnicode_InternFromString("register_hook");
};
const Names& names() {
  static const Names found;
  return found;
}

bool is_same(const py::object& reference, py::handle tensor) {
  return quietly(PyObject_CallNoArgs(reference.ptr())).ptr() == tensor.ptr();
}

// Adds to a step, and marks its record where there was nothing to judge.
void add_to(RangeEntries& entries, const py::object& record, int32_t row, const RangeReading& reading) {
  const bool idle = entries.judged == entries.items.size();
  if (idle && PyObject_SetAttr(record.ptr(), names().touched, Py_True) != 0) throw py::error_already_set();
  entries.add(row, reading);
}

struct ModuleHook {
  static constexpr const char* kName = "take";
  std::shared_ptr<RangeMeter> meter;
  int32_t row;

  PyObject* operator()(PyObject* output) const { return PyBool_FromLong(meter->take(row, output)); }
};

}  // namespace

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

RangeMeter::RangeMeter(py::object type, py::object dict_type, py::object grad_enabled, py::object take_other)
    : type_(std::move(type)),
      version_(type_, "_version"),
      is_neg_(type_, "is_neg"),
      requires_grad_(type_, "requires_grad"),
      grad_fn_(type_, "grad_fn"),
      hooks_(type_, "_backward_hooks"),
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
  const py::object version = version_.of(tensor.ptr());  // inference tensors have none
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
  const bool differentiable = requires_grad_.of(output).ptr() == Py_True;
  py::object node;
  if (differentiable) {
    node = grad_fn_.of(output);
    if (!node || node.is_none()) return false;
  }
  dlpack::Tensor view;
  RangeReading reading;
  if (!find_tensor(output, &view, &reading)) return false;
  if (reading.numel == 0 || !is_new(output)) return true;
  const auto entries = entries_;  // another thread may end the step while this one reads
  const py::object record = record_;
  read_found(output, view, &reading);
  add_to(*entries, record, row, reading);
  if (differentiable) hang({shared_from_this(), entries, record, row + 1}, output, node.ptr());
  return true;
}

void RangeMeter::take_gradient(RangeEntries& entries, py::handle record, int32_t row, PyObject* grad) {
  if (closed_) return;
  RangeReading reading;
  if (!is_plain(grad) || !read_ranges_of(grad, &reading)) {
    call(take_other_, {borrowed(record), py::int_(row), borrowed(grad)});
  } else if (reading.numel != 0) {
    add_to(entries, borrowed(record), row, reading);
  }
}

// A negated view has the sign of its elements elsewhere.
bool RangeMeter::is_plain(PyObject* object) const {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != type_.ptr()) return false;
  return is_neg_.of(object).ptr() == Py_False;
}

// As Tensor.register_hook does, without its way through Python. No handle: the hook goes with the graph.
void RangeMeter::hang(GradientHook to_hang, PyObject* tensor, PyObject* node) const {
  const Names& n = names();
  const py::object hook = make_function(std::make_unique<GradientHook>(std::move(to_hang)));
  py::object hooks = hooks_.of(tensor);
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

py::object RangeMeter::watched_call(int32_t row, py::object call, py::object other) {
  const auto take_result = [meter = shared_from_this(), row](PyObject* result) { return meter->take(row, result); };
  return make_watched_call(std::move(call), take_result, std::move(other));
}

}  // namespace nanscan
