// Where the tensors of a list lie and how, in one piece of bytes each, so that two lists are compared at once.
#pragma once

#include "python_objects.h"

namespace nanscan {

// (addresses as int64; device, type, shape, strides and laziness of each tensor; whether one is lazily conjugated or
// negated, so that its memory is not what it means), or None if a table does not serve one of them.
pybind11::object layouts_of(const pybind11::list& tensors);

}  // namespace nanscan
