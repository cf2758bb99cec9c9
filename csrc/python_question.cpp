#include "python_question.h"

#include <stdexcept>
#include <string>

namespace py = pybind11;

namespace nanscan {

Question::Question(const py::object& type, const char* name) : type_(type), name_(py::str(name)) {
  descriptor_ = type.attr(name);
  PyObject* found = descriptor_.ptr();
  is_method_ = Py_IS_TYPE(found, &PyMethodDescr_Type) || PyFunction_Check(found);
  if (Py_IS_TYPE(found, &PyGetSetDescr_Type)) getter_ = reinterpret_cast<PyGetSetDescrObject*>(found)->d_getset;
  if (!Py_IS_TYPE(found, &PyMethodDescr_Type)) return;
  PyMethodDef* method = reinterpret_cast<PyMethodDescrObject*>(found)->d_method;
  if ((method->ml_flags & METH_NOARGS) != 0) method_ = method;
}

py::object Question::of(PyObject* tensor) const {
  if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == type_.ptr()) {
    if (getter_ != nullptr) return quietly(getter_->get(tensor, getter_->closure));
    if (method_ != nullptr) return quietly(method_->ml_meth(tensor, nullptr));
  }
  py::object answer = quietly(PyObject_GetAttr(tensor, name_.ptr()));  // a subclass may have its own
  return answer && is_method_ ? quietly(PyObject_CallNoArgs(answer.ptr())) : answer;
}

bool Flag::of(PyObject* tensor) {
  if (Py_TYPE(tensor) != type_) {
    type_ = Py_TYPE(tensor);
    const py::object type = borrowed(reinterpret_cast<PyObject*>(type_));
    question_.reset();
    if (py::hasattr(type, name_)) question_.emplace(type, name_);
  }
  if (!question_) return false;
  const py::object answer = question_->of(tensor);
  if (!answer) throw std::runtime_error(std::string("a tensor does not say whether ") + name_);
  return answer.ptr() == Py_True;
}

}  // namespace nanscan
