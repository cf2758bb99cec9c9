// The ranges of tensors as Python asks for them, and those of a step as it reads them.
#pragma once

#include "dlpack_abi.h"
#include "python_objects.h"
#include "range_entries.h"

namespace nanscan {

// (numel, low, high, norm, zeros, tiny, NaN, Inf, +Inf) of one tensor on the host, or None: another engine must.
pybind11::object ranges_of(pybind11::handle tensor);

// Where a tensor lies, its dtype and size. False: not on the host, of another dtype, or not served by a table.
bool find_tensor(pybind11::handle tensor, dlpack::Tensor* view, RangeReading* out);

// Measures a tensor that was found.
void read_found(pybind11::handle tensor, const dlpack::Tensor& view, RangeReading* out);

// Both at once; false: not found.
bool read_ranges_of(pybind11::handle tensor, RangeReading* out);

// [(row, numbers, dtype's name, whether it was not judged yet)] of each; then there are none.
pybind11::list take_items(RangeEntries& entries);

// ([row], [rms]) of what was not judged yet, which then is; None: a row has several tensors, or leaves its bound.
// `bounds`: the largest ordinary magnitude by dtype's name.
pybind11::object judge_items(RangeEntries& entries, const pybind11::dict& bounds);

}  // namespace nanscan
