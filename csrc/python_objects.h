// What the files behind the Python face need of Python: owned references, calls, the GIL. They include this instead of
// pybind11.h, which costs seconds of compiling in each file that includes it; module.cpp alone does.
#pragma once

#include <pybind11/pytypes.h>

#include <cstdint>
#include <initializer_list>

namespace nanscan {

constexpr int64_t kReleaseGilBytes = 256 * 1024;  // a shorter read ends before another thread could use the gap

class ReleaseGil {
 public:
  ReleaseGil() : state_(PyEval_SaveThread()) {}
  ~ReleaseGil() { PyEval_RestoreThread(state_); }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_;
};

// Takes over a new reference; null is a Python error.
inline pybind11::object owned(PyObject* reference) {
  if (reference == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(reference);
}

inline pybind11::object call(pybind11::handle function, std::initializer_list<pybind11::object> arguments) {
  pybind11::tuple given(arguments.size());
  size_t i = 0;
  for (const pybind11::object& argument : arguments) given[i++] = argument;
  return owned(PyObject_CallObject(function.ptr(), given.ptr()));
}

inline pybind11::tuple tuple_of(std::initializer_list<pybind11::object> items) {
  pybind11::tuple made(items.size());
  size_t i = 0;
  for (const pybind11::object& item : items) made[i++] = item;
  return made;
}

inline pybind11::object borrowed(pybind11::handle object) {
  return pybind11::reinterpret_borrow<pybind11::object>(object);
}

}  // namespace nanscan
