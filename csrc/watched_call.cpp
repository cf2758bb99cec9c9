#include "watched_call.h"

#include <exception>
#include <memory>
#include <utility>

namespace py = pybind11;

namespace nanscan {
namespace {

using Take = std::function<bool(PyObject*)>;

struct WatchedCall {
  PyObject_HEAD;
  PyObject* call;
  PyObject* other;
  Take* take;
};

WatchedCall* watched(PyObject* self) { return reinterpret_cast<WatchedCall*>(self); }

// False: a Python error is set.
bool look_at(const WatchedCall& self, PyObject* result) {
  try {
    if ((*self.take)(result)) return true;
    return static_cast<bool>(py::reinterpret_steal<py::object>(PyObject_CallOneArg(self.other, result)));
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return false;
}

PyObject* call_watched(PyObject* self, PyObject* args, PyObject* kwargs) {
  const py::object alive = borrowed(self);  // the module may drop it while it runs
  PyObject* result = PyObject_Call(watched(self)->call, args, kwargs);
  if (result != nullptr && !look_at(*watched(self), result)) Py_CLEAR(result);
  return result;
}

PyObject* copy_as_none(PyObject*, PyObject*) {
  return tuple_of({borrowed(reinterpret_cast<PyObject*>(Py_TYPE(Py_None))), py::tuple(0)}).release().ptr();
}

int traverse(PyObject* self, visitproc visit, void* arg) {  // the module that it hangs on is behind both
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(watched(self)->call);
  Py_VISIT(watched(self)->other);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(watched(self)->call);
  Py_CLEAR(watched(self)->other);
  return 0;
}

void destroy(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  delete watched(self)->take;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename Function>
void* slot(Function* function) {
  return reinterpret_cast<void*>(function);
}

PyTypeObject* watched_call_type() {
  static PyMethodDef methods[] = {{"__reduce__", copy_as_none, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_call, slot(call_watched)}, {Py_tp_traverse, slot(traverse)},
                                {Py_tp_clear, slot(clear)},       {Py_tp_dealloc, slot(destroy)},
                                {Py_tp_methods, methods},         {0, nullptr}};
  static PyType_Spec spec = {"nanscan._C.WatchedCall", sizeof(WatchedCall), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static PyObject* const type = owned(PyType_FromSpec(&spec)).release().ptr();
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace

py::object make_watched_call(py::object call, Take take, py::object other) {
  auto held = std::make_unique<Take>(std::move(take));
  PyTypeObject* type = watched_call_type();
  py::object made = owned(type->tp_alloc(type, 0));
  *watched(made.ptr()) = {watched(made.ptr())->ob_base, call.release().ptr(), other.release().ptr(), held.release()};
  return made;
}

}  // namespace nanscan
