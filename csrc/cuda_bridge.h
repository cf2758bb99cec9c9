// Loads the CUDA library and hands it what a scan gathered; reads its answer back into rows.
#pragma once

#include <string>

#include "python_objects.h"
#include "python_tensors.h"
#include "scan_result.h"

namespace nanscan {

// Opens the library at `path`; throws std::runtime_error with the loader's words if it does not fit.
void load_cuda(const std::string& path);
bool cuda_loaded();
std::string cuda_build();  // such as "CUDA 13.0, sm_75 sm_80"; empty: not loaded

// Loads the kernels on a device; throws std::runtime_error with the library's words if they can't run there.
void prepare_cuda(int32_t device);

// What a launch needs beside the tensors. `hooks` is a Python object: serves(device) says whether the library is loaded
// and runs there; allocate(device, bytes), workspace(device, stream, bytes) give uint8 tensors on the device,
// dense(tensor) a row-major copy of a tensor, flag(device, tensor) one float32 there. The flags are tensors or None.
struct CudaRequest {
  pybind11::object hooks;
  double clip_norm;
  pybind11::object grad_scale;
  pybind11::object found_inf;
};

// Queues the scan of `group` on the device's current stream and returns the output tensor; nothing is waited for.
pybind11::object launch_on_cuda(DeviceGroup& group, const Gathered& gathered, const CudaRequest& request);

// Fills a segment's rows and totals from the bytes of its output, now in host memory.
void fill_from_output(Segment& segment, const void* host, size_t bytes);

// Queues: fill every gradient with zeros where the 0-dim float32 `flag` is 1.0. False: some gradient is not plain
// memory.
bool clear_on_cuda(const Gathered& gathered, pybind11::handle flag);

}  // namespace nanscan
