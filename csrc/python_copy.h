// Copies between tensors of a Python framework, as flat memory.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "cpu_copy.h"

namespace nanscan {

// Notes the copy of `source` into `target`, both row-major in the host's memory, of equal type and shape and apart.
// False: one of them is not, and the framework has to copy it.
bool add_copy(pybind11::handle source, pybind11::handle target, std::vector<CopyJob>* jobs);

}  // namespace nanscan
