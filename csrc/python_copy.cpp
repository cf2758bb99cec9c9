#include "python_copy.h"

#include <cstring>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "cpu_copy.h"
#include "layout.h"
#include "python_tensors.h"

namespace py = pybind11;

namespace nanscan {
namespace {

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

bool copy_without_gil(const std::vector<CopyJob>& jobs) {
  ReleaseGil release;
  return copy_finite(jobs);
}

// Notes the copy of `source` into `target`, both row-major in the host's memory, of equal type and shape and apart.
// False: one of them is not, and the framework has to copy it.
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

}  // namespace

py::tuple copy_tensors(const py::list& sources, const py::list& targets) {
  if (sources.size() != targets.size()) throw std::invalid_argument("as many targets as sources are needed");
  std::vector<CopyJob> jobs;
  py::list left;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (!add_copy(sources[i], targets[i], &jobs)) left.append(py::int_(i));
  }
  return tuple_of({py::bool_(copy_without_gil(jobs)), left});
}

py::object plan_copies(const py::list& sources, const py::list& targets) {
  if (sources.size() != targets.size()) throw std::invalid_argument("as many targets as sources are needed");
  std::vector<CopyJob> jobs;
  jobs.reserve(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    if (!add_copy(sources[i], targets[i], &jobs)) return py::none();
    if (jobs.size() == i) jobs.push_back({nullptr, nullptr, 0, Words::Plain});  // without elements
  }
  return py::bytes(reinterpret_cast<const char*>(jobs.data()), jobs.size() * sizeof(CopyJob));
}

py::object copy_planned(const py::bytes& plan, const py::bytes& addresses) {
  const std::string_view planned(plan), from(addresses);
  std::vector<CopyJob> jobs(planned.size() / sizeof(CopyJob));
  if (from.size() != jobs.size() * sizeof(int64_t)) throw std::invalid_argument("an address is needed for each copy");
  std::memcpy(static_cast<void*>(jobs.data()), planned.data(), planned.size());
  for (size_t i = 0; i < jobs.size(); ++i) {
    int64_t address;
    std::memcpy(&address, from.data() + i * sizeof(address), sizeof(address));
    jobs[i].from = reinterpret_cast<const char*>(address);
    if (jobs[i].bytes != 0 && static_cast<uintptr_t>(address) < lowest_allocation()) return py::none();
  }
  return py::bool_(copy_without_gil(jobs));
}

}  // namespace nanscan
