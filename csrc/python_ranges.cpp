#include "python_ranges.h"

#include <array>

#include "python_tensors.h"

namespace py = pybind11;

namespace nanscan {
namespace {

struct NamedType {
  DType dtype;
  const char* name;
};
constexpr std::array<NamedType, 4> kDTypes = {{{DType::Float32, "float32"},
                                               {DType::BFloat16, "bfloat16"},
                                               {DType::Float16, "float16"},
                                               {DType::Float64, "float64"}}};
size_t index_of(DType dtype) {
  size_t i = 0;
  while (kDTypes[i].dtype != dtype) ++i;
  return i;
}

py::tuple numbers_of(const RangeReading& reading) {
  const Ranges& r = reading.ranges;
  return tuple_of({py::int_(reading.numel), py::float_(r.low), py::float_(r.high), py::float_(reading.norm()),
                   py::int_(r.zeros), py::int_(r.tiny), py::int_(r.nan_count), py::int_(r.inf_count),
                   py::int_(r.positive_infs)});
}

}  // namespace

bool find_tensor(py::handle tensor, dlpack::Tensor* view, RangeReading* out) {
  return host_tensor(tensor, view, &out->dtype, &out->numel) && can_measure_ranges(out->dtype);
}

void read_found(py::handle tensor, const dlpack::Tensor& view, RangeReading* out) {
  Layout layout;
  const bool row_major = is_row_major(view.ndim, view.shape, view.strides);
  if (!row_major) layout = make_layout(view.ndim, view.shape, view.strides);
  const int64_t to_read = row_major ? out->numel : layout.numel;
  const char* data = data_of(view);
  const auto read = [&] { return measure_ranges(out->dtype, data, to_read, row_major ? nullptr : &layout); };
  if (to_read * element_bytes(out->dtype) < kReleaseGilBytes) {
    out->ranges = read();
  } else {
    py::object alive = py::reinterpret_borrow<py::object>(tensor);
    ReleaseGil release;
    out->ranges = read();
  }
}

bool read_ranges_of(py::handle tensor, RangeReading* out) {
  dlpack::Tensor view;
  if (!find_tensor(tensor, &view, out)) return false;
  read_found(tensor, view, out);
  return true;
}

py::object ranges_of(py::handle tensor) {
  RangeReading reading;
  return read_ranges_of(tensor, &reading) ? py::object(numbers_of(reading)) : py::none();
}

py::list take_items(RangeEntries& entries) {
  py::list out;
  for (size_t i = 0; i < entries.items.size(); ++i) {
    const auto& [row, reading] = entries.items[i];
    out.append(tuple_of({py::int_(row), numbers_of(reading), py::str(kDTypes[index_of(reading.dtype)].name),
                         py::bool_(i >= entries.judged)}));
  }
  entries.items.clear();
  entries.judged = 0;
  entries.any_inf = false;
  return out;
}

py::object judge_items(RangeEntries& entries, const py::dict& bounds) {
  std::array<double, kDTypes.size()> bound;
  for (size_t i = 0; i < kDTypes.size(); ++i) bound[i] = py::float_(bounds[kDTypes[i].name]);
  const auto bound_of = [&](DType dtype) { return bound[index_of(dtype)]; };
  if (!entries.rows_differ() || !entries.fresh_within(bound_of)) return py::none();
  py::list rows, rms;
  for (; entries.judged < entries.items.size(); ++entries.judged) {
    const auto& item = entries.items[entries.judged];
    rows.append(py::int_(item.row));
    rms.append(py::float_(item.reading.rms()));
  }
  return tuple_of({rows, rms});
}

}  // namespace nanscan
