// The exact Python types whose tensors the engine may read, each with its framework's DLPack table.
#pragma once

#include <cstdint>
#include <string>

#include "dlpack_abi.h"
#include "dtype.h"
#include "python_objects.h"
#include "torch_shortcuts.h"

namespace nanscan {

// One exact Python type whose objects the engine may read: its table, and the getters that spare an attribute lookup.
struct TensorType {
  PyTypeObject* type;
  const dlpack::ExchangeApi* api;
  PyGetSetDef* grad;
  PyGetSetDef* layout;
  PyGetSetDef* requires_grad;
  PyObject* strided;           // the framework's marker of ordinary layout, or None
  PyMethodDescrObject* dense;  // method that says whether the table may be asked; null: always
  const TorchShortcuts* shortcuts = nullptr;
};

// The entry of an object's exact type; null: the engine was not taught it.
const TensorType* type_of(PyObject* object);

// Teaches the engine an exact tensor type. `strided` is the framework's marker of ordinary layout (torch.strided) or
// None. `dense` names a method that must answer True before the table may be asked about a tensor (Paddle's does not
// look itself); empty: there is none. A type that is known already stays as it is.
void register_tensor_type(pybind11::type type, pybind11::object strided, const std::string& dense);

// Looks for shortcuts to the gradients of this type of parameter and to those gradients' type. True: they were found.
bool learn_shortcuts(pybind11::handle parameter);

// Reads a tensor through its table. False: not served (no Python error is left set).
bool read_view(PyObject* object, dlpack::Tensor* view);

// The first element.
inline const char* data_of(const dlpack::Tensor& view) {
  return static_cast<const char*>(view.data) + view.byte_offset;
}

// False: not an element type of this engine.
bool find_dtype(const dlpack::DataType& type, DType* out);

// Start of the process's heap: an address below it is no allocation but the offset of a view into freed storage.
uintptr_t lowest_allocation();

// The current stream of a device as the framework sees it (dlpack current_work_stream).
void* current_stream(const dlpack::Device& device);

}  // namespace nanscan
