#include "python_layouts.h"

#include <string>

#include "python_question.h"
#include "python_tensors.h"

namespace py = pybind11;

namespace nanscan {
namespace {

template <typename T>
void append(std::string* bytes, const T* values, size_t count) {
  bytes->append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

}  // namespace

py::object layouts_of(const py::list& tensors) {
  std::string addresses, layouts;
  Flag is_conj("is_conj"), is_neg("is_neg");
  bool any_lazy = false;
  addresses.reserve(tensors.size() * sizeof(int64_t));
  for (py::handle tensor : tensors) {
    dlpack::Tensor view;
    if (!read_view(tensor.ptr(), &view)) return py::none();
    const int64_t address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data) + view.byte_offset);
    const bool complex = view.dtype.code == dlpack::kDLComplex;
    const char lazy = (complex && is_conj.of(tensor.ptr()) ? 1 : 0) | (is_neg.of(tensor.ptr()) ? 2 : 0);
    any_lazy |= lazy != 0;
    append(&addresses, &address, 1);
    append(&layouts, &lazy, 1);
    append(&layouts, &view.device.device_type, 1);
    append(&layouts, &view.device.device_id, 1);
    append(&layouts, &view.ndim, 1);
    append(&layouts, &view.dtype.code, 1);
    append(&layouts, &view.dtype.bits, 1);
    append(&layouts, &view.dtype.lanes, 1);
    append(&layouts, view.shape, static_cast<size_t>(view.ndim));
    append(&layouts, view.strides, view.strides == nullptr ? 0 : static_cast<size_t>(view.ndim));
  }
  return tuple_of({py::bytes(addresses), py::bytes(layouts), py::bool_(any_lazy)});
}

}  // namespace nanscan
