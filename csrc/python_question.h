// Asks a framework's tensors a question of their own, such as is_neg() or requires_grad, without a detour.
#pragma once

#include <optional>

#include "python_objects.h"

namespace nanscan {

// A call that may fail; the failure is forgotten.
inline pybind11::object quietly(PyObject* result) {
  if (result == nullptr) PyErr_Clear();
  return pybind11::reinterpret_steal<pybind11::object>(result);
}

// What a type of tensors says of one: an attribute, or a method without arguments. Found once.
class Question {
 public:
  Question(const pybind11::object& type, const char* name);

  // Null: it could not say.
  pybind11::object of(PyObject* tensor) const;

 private:
  pybind11::object type_, name_, descriptor_;
  bool is_method_;
  PyGetSetDef* getter_ = nullptr;
  PyMethodDef* method_ = nullptr;
};

// A yes-or-no question to tensors of any type, found anew where the type changes.
class Flag {
 public:
  explicit Flag(const char* name) : name_(name) {}

  // False where the framework has no such question.
  bool of(PyObject* tensor);

 private:
  const char* name_;
  PyTypeObject* type_ = nullptr;
  std::optional<Question> question_;
};

}  // namespace nanscan
