// Asks a framework's tensors a yes-or-no question of their own, such as is_neg().
#pragma once

#include <string>

#include "python_objects.h"

namespace nanscan {

// A method without arguments of the framework's own tensors, found once for each type and called without a detour.
class Flag {
 public:
  explicit Flag(const char* name) : name_(name) {}

  // False where the framework has no such method.
  bool of(PyObject* tensor) {
    if (Py_TYPE(tensor) != type_) find(Py_TYPE(tensor));
    if (call_ == nullptr) return false;
    PyObject* answer = call_(tensor, nullptr);
    if (answer == nullptr) throw pybind11::error_already_set();
    Py_DECREF(answer);
    return answer == Py_True;
  }

 private:
  void find(PyTypeObject* type) {
    type_ = type;
    call_ = nullptr;
    pybind11::handle owner(reinterpret_cast<PyObject*>(type));
    if (!pybind11::hasattr(owner, name_)) return;
    pybind11::object method = owner.attr(name_);
    if (Py_TYPE(method.ptr()) != &PyMethodDescr_Type)
      throw pybind11::type_error(std::string(name_) + " is no plain method");
    const PyMethodDef* known = reinterpret_cast<PyMethodDescrObject*>(method.ptr())->d_method;
    if ((known->ml_flags & METH_NOARGS) == 0) throw pybind11::type_error(std::string(name_) + " takes arguments");
    call_ = known->ml_meth;
  }

  const char* name_;
  PyTypeObject* type_ = nullptr;
  PyCFunction call_ = nullptr;
};

}  // namespace nanscan
