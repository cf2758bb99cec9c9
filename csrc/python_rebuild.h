// Nested state with other tensors in place of its own: the containers are new, the tensors are given.
#pragma once

#include "python_objects.h"

namespace nanscan {

// Returns `value` rebuilt with the next of `targets` in place of each tensor, in the order in which they are met, and
// the list of those tensors. Dicts, ordered dicts, lists and tuples of exactly these types are rebuilt, `scalars` kept;
// everything else is what `copy_other` returns for it.
//
// Raises LookupError where there are more tensors than targets or a container is met twice.
pybind11::tuple rebuild(pybind11::handle value, const pybind11::list& targets, const pybind11::tuple& tensors,
                        const pybind11::tuple& scalars, const pybind11::object& copy_other);

}  // namespace nanscan
