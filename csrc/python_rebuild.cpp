#include "python_rebuild.h"

#include <algorithm>
#include <unordered_set>
#include <vector>

namespace py = pybind11;

namespace nanscan {
namespace {

using Types = std::vector<PyTypeObject*>;

Types types_in(const py::tuple& given) {
  Types types;
  for (py::handle type : given) types.push_back(reinterpret_cast<PyTypeObject*>(type.ptr()));
  return types;
}

[[noreturn]] void misfit(const char* why) {
  PyErr_SetString(PyExc_LookupError, why);
  throw py::error_already_set();
}

// Python's own limit on nesting, kept for the time of one call.
class Depth {
 public:
  Depth() {
    if (Py_EnterRecursiveCall(" while copying nested state") != 0) throw py::error_already_set();
  }
  ~Depth() { Py_LeaveRecursiveCall(); }
  Depth(const Depth&) = delete;
  Depth& operator=(const Depth&) = delete;
};

class Rebuild {
 public:
  Rebuild(const py::list& targets, const py::tuple& tensors, const py::tuple& scalars, const py::object& copy_other)
      : targets_(targets), tensors_(types_in(tensors)), scalars_(types_in(scalars)), copy_other_(copy_other) {}

  py::object copy(py::handle value) {
    PyTypeObject* type = Py_TYPE(value.ptr());
    if (is_one_of(tensors_, type)) return next_target(value);
    if (is_one_of(scalars_, type)) return py::reinterpret_borrow<py::object>(value);
    if (!seen_.insert(value.ptr()).second) misfit("a container in two places");
    Depth depth;
    if (type == &PyDict_Type) return dict(value);
    if (type == &PyList_Type) return list(value);
    if (type == &PyTuple_Type) return py::tuple(list(value));
    if (type == &PyODict_Type) return ordered(value);
    return call(copy_other_, {borrowed(value)});
  }

  py::list sources;

 private:
  static bool is_one_of(const Types& types, PyTypeObject* type) {
    return std::find(types.begin(), types.end(), type) != types.end();
  }

  py::object next_target(py::handle tensor) {
    if (next_ >= targets_.size()) misfit("more tensors than targets");
    sources.append(tensor);
    return targets_[next_++];
  }

  // `copy_other` may run anybody's code: the items are taken before it can change the dict.
  py::object dict(py::handle value) {
    py::dict made;
    for (const auto& [key, item] : items_of(value)) {
      if (PyDict_SetItem(made.ptr(), key.ptr(), copy(item).ptr()) != 0) throw py::error_already_set();
    }
    return made;
  }

  py::object ordered(py::handle value) {
    const py::object copies = owned(PyImport_ImportModule("copy"));
    py::object made = call(copies.attr("copy"), {borrowed(value)});  // with its attributes
    for (py::handle pair : py::list(call(value.attr("items"), {}))) {
      const py::tuple item = py::reinterpret_borrow<py::tuple>(pair);
      made[item[0]] = copy(item[1]);
    }
    return made;
  }

  py::list list(py::handle value) {
    const py::tuple items(py::reinterpret_borrow<py::object>(value));
    py::list made(items.size());
    for (size_t i = 0; i < items.size(); ++i) made[i] = copy(items[i]);
    return made;
  }

  static std::vector<std::pair<py::object, py::object>> items_of(py::handle dict) {
    std::vector<std::pair<py::object, py::object>> items;
    items.reserve(static_cast<size_t>(PyDict_GET_SIZE(dict.ptr())));
    PyObject *key, *item;
    for (Py_ssize_t at = 0; PyDict_Next(dict.ptr(), &at, &key, &item);)
      items.emplace_back(py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(item));
    return items;
  }

  const py::list& targets_;
  const Types tensors_, scalars_;
  const py::object& copy_other_;
  size_t next_ = 0;
  std::unordered_set<PyObject*> seen_;
};

}  // namespace

py::tuple rebuild(py::handle value, const py::list& targets, const py::tuple& tensors, const py::tuple& scalars,
                  const py::object& copy_other) {
  Rebuild work(targets, tensors, scalars, copy_other);
  py::object result = work.copy(value);
  return tuple_of({result, work.sources});
}

}  // namespace nanscan
