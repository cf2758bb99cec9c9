#include "python_types.h"

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace py = pybind11;

namespace nanscan {
namespace {

std::vector<TensorType> tensor_types;

// A table refuses a sparse tensor with an exception that costs milliseconds. Once one has been met, layouts are asked
// for first.
bool ask_layout_first = false;

const TensorType* type_of_exact(const PyTypeObject* type) {
  for (const TensorType& t : tensor_types) {
    if (type == t.type) return &t;
  }
  return nullptr;
}

PyGetSetDef* getter(py::handle type, const char* name) {
  if (!py::hasattr(type, name)) return nullptr;
  py::object descriptor = type.attr(name);
  if (std::strcmp(Py_TYPE(descriptor.ptr())->tp_name, "getset_descriptor") != 0) return nullptr;
  return reinterpret_cast<PyGetSetDescrObject*>(descriptor.ptr())->d_getset;  // lives as long as the type
}

PyMethodDescrObject* method(py::handle type, const std::string& name) {
  if (name.empty()) return nullptr;
  py::object descriptor = type.attr(name.c_str());
  if (!Py_IS_TYPE(descriptor.ptr(), &PyMethodDescr_Type)) throw std::invalid_argument(name + " is no built-in method");
  return reinterpret_cast<PyMethodDescrObject*>(descriptor.ptr());  // lives as long as the type
}

// Calls a built-in method without arguments. Paddle's take (self, args, kwargs): calling the C function spares the
// interpreter's way there.
PyObject* call(PyMethodDescrObject* method, PyObject* self) {
  static PyObject* const no_arguments = PyTuple_New(0);
  const PyMethodDef* def = method->d_method;
  if (def->ml_flags == (METH_VARARGS | METH_KEYWORDS)) {
    return reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(def->ml_meth))(self, no_arguments,
                                                                                                 nullptr);
  }
  return PyObject_CallFunctionObjArgs(reinterpret_cast<PyObject*>(method), self, nullptr);
}

// Paddle's table takes every tensor for a dense one: with sparse rows, or without an implementation, it would crash.
bool is_dense(const TensorType& t, PyObject* object) {
  if (t.dense == nullptr) return true;
  PyObject* answer = call(t.dense, object);
  if (answer == nullptr) PyErr_Clear();
  Py_XDECREF(answer);  // True and False are immortal
  return answer == Py_True;
}

}  // namespace

const TensorType* type_of(PyObject* object) { return type_of_exact(Py_TYPE(object)); }

uintptr_t lowest_allocation() {
  static const uintptr_t found = [] {
    uintptr_t start = uintptr_t{1} << 16;
    if (FILE* maps = std::fopen("/proc/self/maps", "r")) {
      char line[512];
      while (std::fgets(line, sizeof(line), maps) != nullptr) {
        unsigned long long from = 0;
        if (std::strstr(line, "[heap]") != nullptr && std::sscanf(line, "%llx-", &from) == 1) start = from;
      }
      std::fclose(maps);
    }
    constexpr uintptr_t kMapped = uintptr_t{1} << 36;  // mmap hands out addresses far above
    return start < kMapped ? start : kMapped;
  }();
  return found;
}

bool find_dtype(const dlpack::DataType& t, DType* out) {
  using namespace dlpack;
  if (t.lanes != 1) return false;
#define NANSCAN_MATCH(name, text, bytes, type_code, type_bits, parts) \
  if (t.code == type_code && t.bits == type_bits) {                   \
    *out = DType::name;                                               \
    return true;                                                      \
  }
  NANSCAN_FOR_EACH_DTYPE(NANSCAN_MATCH)
#undef NANSCAN_MATCH
  return false;
}

bool read_view(PyObject* object, dlpack::Tensor* view) {
  const TensorType* t = type_of(object);
  if (t == nullptr) return false;
  if (ask_layout_first && t->layout != nullptr && t->strided != Py_None) {
    PyObject* layout = t->layout->get(object, t->layout->closure);
    if (layout == nullptr) PyErr_Clear();
    Py_XDECREF(layout);  // layouts are immortal singletons
    if (layout != t->strided) return false;
  }
  if (t->shortcuts != nullptr && t->shortcuts->has_views()) {
    try {
      t->shortcuts->view(object, view);
      return true;
    } catch (...) {
      ask_layout_first = true;
      return false;
    }
  }
  if (!is_dense(*t, object)) return false;
  if (t->api->dltensor_from_py_object_no_sync(object, view) == 0) return true;
  PyErr_Clear();
  ask_layout_first = true;
  return false;
}

void register_tensor_type(py::type type, py::object strided, const std::string& dense) {
  if (type_of_exact(reinterpret_cast<PyTypeObject*>(type.ptr())) != nullptr) return;
  py::object capsule = type.attr("__dlpack_c_exchange_api__");
  auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  if (api == nullptr) throw py::error_already_set();
  if (api->header.version.major != dlpack::kMajorVersion) {
    throw std::runtime_error("the framework speaks DLPack " + std::to_string(api->header.version.major) +
                             ".x, this engine speaks 1.x");
  }
  PyMethodDescrObject* asked = method(type, dense);
  auto* exact = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
  tensor_types.push_back({exact, api, getter(type, "grad"), getter(type, "layout"), getter(type, "requires_grad"),
                          strided.inc_ref().ptr(), asked, nullptr});
}

bool learn_shortcuts(py::handle parameter) {
  const TorchShortcuts* found = find_shortcuts(parameter);
  if (found == nullptr) return false;
  const PyObject* gradient = py::object(parameter.attr("grad")).ptr();
  for (TensorType& t : tensor_types) {
    if (t.type == Py_TYPE(parameter.ptr()) || t.type == Py_TYPE(gradient)) t.shortcuts = found;
  }
  return true;
}

void* current_stream(const dlpack::Device& device) {
  void* stream = nullptr;
  for (const TensorType& t : tensor_types) {
    if (t.api->current_work_stream == nullptr) continue;
    if (t.api->current_work_stream(device.device_type, device.device_id, &stream) != 0) throw py::error_already_set();
    return stream;
  }
  return stream;
}

}  // namespace nanscan
