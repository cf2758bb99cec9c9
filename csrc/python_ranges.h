// The ranges of tensors as Python asks for them: of one tensor, and of all that a watched model makes in a step.
#pragma once

#include <pybind11/pybind11.h>

namespace nanscan {

// (numel, low, high, norm, zeros, tiny, NaN, Inf, +Inf) of one tensor on the host, or None: another engine must.
pybind11::object ranges_of(pybind11::handle tensor);

// Adds RangeEntries and RangeMeter to the module.
void define_range_meter(pybind11::module_& m);

}  // namespace nanscan
