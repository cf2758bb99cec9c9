// Copies between tensors of a Python framework, as flat memory.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "cpu_copy.h"

namespace nanscan {

// Notes the copy of `source` into `target`, both row-major in the host's memory, of equal type and shape and apart.
// False: one of them is not, and the framework has to copy it.
bool add_copy(pybind11::handle source, pybind11::handle target, std::vector<CopyJob>* jobs);

// The copies of `sources` into `targets` as bytes for `copy_planned`; None if the framework has to make one of them.
pybind11::object plan_copies(const pybind11::list& sources, const pybind11::list& targets);

// Makes planned copies once more, from these addresses (int64 each): the sources, of the same layouts, may have moved.
// Returns whether everything is finite; None, with nothing copied: an address can't be read.
pybind11::object copy_planned(const pybind11::bytes& plan, const pybind11::bytes& addresses);

}  // namespace nanscan
