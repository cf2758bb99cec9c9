// The Python face of the batch check: `nanscan._C.BatchCheck`.
#pragma once

#include <pybind11/pybind11.h>

namespace nanscan {

void bind_batch_check(pybind11::module_& m);

}  // namespace nanscan
