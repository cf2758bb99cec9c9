// The functions inside PyTorch's libraries that its Python attributes end in, called without the way there: `p.grad`
// from C takes 60 ns, these take 8.
#pragma once

#include "dlpack_abi.h"
#include "python_objects.h"

namespace nanscan {

// An `impl` is what a Python tensor holds (c10::TensorImpl*); a `tensor` is a place that holds an impl (at::Tensor*).
struct TorchShortcuts {
  const void* (*grad)(const void* impl);    // where the gradient is held; undefined: there is none
  PyObject* (*wrap)(const void* tensor);    // a new reference to its Python object; None where it is undefined
  bool (*requires_grad)(const void* impl);  // true for what autograd follows
  void (*to_view)(const void* tensor, dlpack::Tensor* view);  // null: not found; throws what it does not serve
  void (*to_view_2_14)(const void* tensor, dlpack::Tensor* view, bool read_only);  // the same since PyTorch 2.14

  bool has_views() const { return to_view != nullptr || to_view_2_14 != nullptr; }
  void view(const PyObject* object, dlpack::Tensor* view) const {
    to_view != nullptr ? to_view(tensor_of(object), view) : to_view_2_14(tensor_of(object), view, false);
  }
  static const void* tensor_of(const PyObject* object) { return object + 1; }  // it follows the object's header
  static const void* impl_of(const PyObject* object) { return *static_cast<void* const*>(tensor_of(object)); }
};

// The shortcuts, if they are found in the libraries that are loaded and give what Python gives for `parameter`, a
// parameter with a gradient; else null. What is found is checked on both, so nothing is taken for granted but that a
// function of the same name and arguments does the same.
const TorchShortcuts* find_shortcuts(pybind11::handle parameter);

}  // namespace nanscan
