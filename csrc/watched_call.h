// What stands in for the call of a watched module: the call itself, then a look at what it returned.
#pragma once

#include <functional>

#include "python_objects.h"

namespace nanscan {

// A callable that hands its arguments to `call` and the result to `take`; where that says false, to `other` too.
// A copy or pickle of it is None: a copied module is not watched.
pybind11::object make_watched_call(pybind11::object call, std::function<bool(PyObject*)> take, pybind11::object other);

}  // namespace nanscan
