#include "python_copy.h"

#include <cstring>

#include "layout.h"
#include "python_tensors.h"

namespace py = pybind11;

namespace nanscan {
namespace {

const char* data_of(const dlpack::Tensor& view) { return static_cast<const char*>(view.data) + view.byte_offset; }

bool find_words(const dlpack::DataType& type, Words* words) {
  DType dtype;
  if (!find_dtype(type, &dtype)) {
    *words = Words::Plain;
    return type.lanes == 1 &&
           (type.code == dlpack::kDLInt || type.code == dlpack::kDLUInt || type.code == dlpack::kDLBool);
  }
  switch (dtype) {
    case DType::Float16:
      *words = Words::Float16;
      return true;
    case DType::BFloat16:
      *words = Words::BFloat16;
      return true;
    case DType::Float32:
    case DType::Complex64:
      *words = Words::Float32;
      return true;
    case DType::Float64:
    case DType::Complex128:
      *words = Words::Float64;
      return true;
    default:  // float8: not every NaN of theirs has all exponent bits set and none without is one
      return false;
  }
}

bool row_major_on_host(const dlpack::Tensor& view) {
  return view.device.device_type == dlpack::kDLCPU && is_row_major(view.ndim, view.shape, view.strides) &&
         reinterpret_cast<uintptr_t>(data_of(view)) >= lowest_allocation();
}

}  // namespace

bool add_copy(py::handle source, py::handle target, std::vector<CopyJob>* jobs) {
  dlpack::Tensor from, to;
  CopyJob job;
  if (!read_view(source.ptr(), &from) || !read_view(target.ptr(), &to) || !find_words(from.dtype, &job.words))
    return false;
  if (std::memcmp(&from.dtype, &to.dtype, sizeof(from.dtype)) != 0 || from.ndim != to.ndim) return false;
  const int64_t count = count_elements(from.ndim, from.shape);
  if (std::memcmp(from.shape, to.shape, sizeof(int64_t) * static_cast<size_t>(from.ndim)) != 0) return false;
  if (count == 0) return true;
  if (!row_major_on_host(from) || !row_major_on_host(to)) return false;
  job.from = data_of(from);
  job.to = const_cast<char*>(data_of(to));
  job.bytes = count * ((from.dtype.bits + 7) / 8);
  const bool apart = job.from + job.bytes <= job.to || job.to + job.bytes <= job.from;
  if (apart) jobs->push_back(job);
  return apart;
}

}  // namespace nanscan
