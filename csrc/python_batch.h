// What was worked out once for batches of one form, held against each batch of that form in one call. It only ever says
// that all is well; what is not, and batches of another form, are for the caller to look at.
#pragma once

#include "python_objects.h"

namespace nanscan {

// A function that says of a batch whether it is of the form of this one and all is well (False: not known).
//
// floats: [(leaf, [(above, up to)])], scanned for NaN and Inf, with odd ranges of the largest magnitude; within:
// [(leaf, low, high, ignored integer or None)]; masks: [(leaf, whether 0 hides)]; varying: [leaf]. A leaf is an index
// of a value.
pybind11::object make_batch_check(pybind11::handle batch, const pybind11::list& floats, const pybind11::list& within,
                                  const pybind11::list& masks, const pybind11::list& varying);

}  // namespace nanscan
