// A Python function of one argument with a C++ object behind it: no way from Python to C++ is shorter.
#pragma once

#include <exception>
#include <memory>

#include "python_objects.h"

namespace nanscan {

// Functor::operator()(PyObject* argument) returns a new reference; Functor::kName is the function's name.
template <typename Functor>
pybind11::object make_function(std::unique_ptr<Functor> functor) {
  static PyMethodDef definition = {Functor::kName,
                                   [](PyObject* self, PyObject* argument) -> PyObject* {
                                     try {
                                       return (*static_cast<Functor*>(PyCapsule_GetPointer(self, nullptr)))(argument);
                                     } catch (pybind11::error_already_set& error) {
                                       error.restore();
                                     } catch (const std::exception& error) {
                                       PyErr_SetString(PyExc_RuntimeError, error.what());
                                     }
                                     return nullptr;
                                   },
                                   METH_O, nullptr};
  pybind11::capsule self(functor.release(), [](void* pointer) { delete static_cast<Functor*>(pointer); });
  return owned(PyCFunction_New(&definition, self.ptr()));
}

}  // namespace nanscan
