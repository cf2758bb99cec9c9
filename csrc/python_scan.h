// Scans, clears and scales what Python holds: lists of tensors, and the gradients of an optimizer's parameter groups.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "python_objects.h"
#include "scan_result.h"

namespace nanscan {

// A scan whose CUDA parts may still be on their way: the output tensor of each, until `fill` has read it.
struct PythonScan : Scan {
  std::vector<std::pair<size_t, pybind11::object>> outputs;

  void fill(const pybind11::list& on_host);
  pybind11::list outputs_as_list() const;
  pybind11::list resolved_as_list() const;
  pybind11::list rows(bool only_bad) const;  // by position; of the type that `set_row_type` was given
};

void set_row_type(pybind11::object type);  // nanscan.engine.result.Row
void forget_row_type();

// The tensors of a sequence, and those of `extra`, which join the counts but not the norms. `resolve` is asked for
// those that the engine can't read by itself; `hooks` are described in cuda_bridge.h, None where there is no CUDA.
std::unique_ptr<PythonScan> scan_tensors(pybind11::handle tensors, pybind11::handle extra, pybind11::object resolve,
                                         pybind11::object hooks);

std::unique_ptr<PythonScan> scan_gradients(pybind11::handle param_groups, pybind11::handle extra,
                                           pybind11::object resolve, pybind11::object hooks, double clip_norm,
                                           pybind11::object grad_scale, pybind11::object found_inf);

// True: the gradients are cleared on their CUDA device where the flag says so. False: the framework has to do it.
bool clear_gradients_if(pybind11::handle param_groups, pybind11::handle flag, pybind11::object resolve);

// In place, on plain CPU memory. False, with nothing changed: some tensor needs the framework's own operators.
bool scale_gradients(pybind11::handle param_groups, double factor, double limit, pybind11::object resolve);

// The same for tensors that autograd does not follow.
bool scale_tensors(pybind11::handle tensors, double factor, double limit, pybind11::object resolve);

// What reading the gradient list costs by itself, for benchmarks: gathers, and returns the number of unique gradients.
size_t gather_only(pybind11::handle param_groups, pybind11::object resolve);

}  // namespace nanscan
