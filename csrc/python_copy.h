// Copies between tensors of a Python framework, as flat memory.
#pragma once

#include "python_objects.h"

namespace nanscan {

// Copies each source into its target. Returns whether all that was copied is finite, and the indices of the pairs that
// were left to the framework: not row-major in the host's memory, unlike in type or shape, or one over the other.
pybind11::tuple copy_tensors(const pybind11::list& sources, const pybind11::list& targets);

// The copies of `sources` into `targets` as bytes for `copy_planned`; None if the framework has to make one of them.
pybind11::object plan_copies(const pybind11::list& sources, const pybind11::list& targets);

// Makes planned copies once more, from these addresses (int64 each): the sources, of the same layouts, may have moved.
// Returns whether everything is finite; None, with nothing copied: an address can't be read.
pybind11::object copy_planned(const pybind11::bytes& plan, const pybind11::bytes& addresses);

}  // namespace nanscan
