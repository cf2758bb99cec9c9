#include "python_batch.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "batch_check.h"
#include "cpu_ranges.h"
#include "python_function.h"
#include "python_question.h"
#include "python_tensors.h"
#include "scan_cpu.h"

namespace py = pybind11;

namespace nanscan {
namespace {

constexpr int64_t kFewPlaces = 4, kManyPlaces = 32;

using Interval = std::pair<double, double>;  // above the first, up to the second

struct Within {
  size_t leaf;
  double low, high;
  std::optional<int64_t> ignored;
};

struct Mask {
  size_t leaf;
  bool zero_hides;
};

struct Leaf {
  PyTypeObject* type;
  dlpack::DataType dtype;
  std::vector<int64_t> shape;
  bool floating;  // scanned for NaN and Inf, ...
  bool bounded;   // ... together with its extremes
  bool integer;
  DType real;
  IntType whole;
  std::vector<Interval> odd_magnitudes;  // of the largest one
};

// The tensors of a batch, kept alive while their memory is read.
struct Held {
  std::vector<py::object> owners;
  std::vector<dlpack::Tensor> views;
  int64_t bytes = 0;
};

bool find_int(const dlpack::DataType& t, IntType* out) {
  using namespace dlpack;
  const auto is = [&](TypeCode code, int bits) { return t.lanes == 1 && t.code == code && t.bits == bits; };
  if (is(kDLInt, 8)) return *out = IntType::Int8, true;
  if (is(kDLInt, 16)) return *out = IntType::Int16, true;
  if (is(kDLInt, 32)) return *out = IntType::Int32, true;
  if (is(kDLInt, 64)) return *out = IntType::Int64, true;
  return *out = IntType::UInt8, is(kDLUInt, 8) || is(kDLBool, 8);
}

StridedView strided(const dlpack::Tensor& t) { return {data_of(t), t.ndim, t.shape, t.strides}; }

// Calls visit(key or null, value) for each entry of a plain tuple, list or dict; false: it is none, or visit said so.
template <typename Visit>
bool for_each_value(PyObject* batch, Visit visit) {
  if (PyDict_CheckExact(batch)) {
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(batch, &at, &key, &value);) {
      if (!visit(key, value)) return false;
    }
    return true;
  }
  if (!PyTuple_CheckExact(batch) && !PyList_CheckExact(batch)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(batch); ++i) {
    if (!visit(nullptr, PySequence_Fast_GET_ITEM(batch, i))) return false;
  }
  return true;
}

bool same_key(PyObject* a, PyObject* b) {  // text alone: comparing anything else may run Python code
  return a == b || (PyUnicode_CheckExact(a) && PyUnicode_CheckExact(b) && PyUnicode_Compare(a, b) == 0);
}

class BatchCheck {
 public:
  static constexpr const char* kName = "all_well";

  BatchCheck(py::handle batch, const py::list& floats, const py::list& within, const py::list& masks,
             const py::list& varying)
      : kind_(Py_TYPE(batch.ptr())) {
    for_each_value(batch.ptr(), [&](PyObject* key, PyObject* value) {
      if (key != nullptr) keys_.push_back(borrowed(key));
      leaves_.push_back(leaf_of(value));
      return true;
    });
    for (py::handle item : floats) {
      const py::tuple given(borrowed(item));
      Leaf& leaf = leaves_.at(index(given[0]));
      leaf.floating = true;
      for (py::handle odd : py::list(given[1])) {
        const py::tuple range(borrowed(odd));
        leaf.odd_magnitudes.emplace_back(py::float_(range[0]), py::float_(range[1]));
      }
    }
    for (py::handle item : within) {
      const py::tuple given(borrowed(item));
      within_.push_back({index(given[0]), py::float_(given[1]), py::float_(given[2]), std::nullopt});
      const py::object ignored = given[3];
      if (!ignored.is_none()) within_.back().ignored = py::int_(ignored);
      leaves_.at(within_.back().leaf).bounded = true;
    }
    for (py::handle item : masks) {
      const py::tuple given(borrowed(item));
      masks_.push_back({index(given[0]), py::bool_(py::object(given[1]))});
    }
    for (py::handle leaf : varying) varying_.push_back(index(borrowed(leaf)));
  }

  PyObject* operator()(PyObject* batch) const { return PyBool_FromLong(all_well(batch)); }

 private:
  static size_t index(const py::object& given) { return static_cast<size_t>(py::int_(given)); }

  // False: not known to be.
  bool all_well(PyObject* batch) const {
    Held held;
    if (!hold(batch, &held)) return false;
    if (held.bytes < kReleaseGilBytes) return values_are_well(held);
    ReleaseGil release;
    return values_are_well(held);
  }

  static Leaf leaf_of(PyObject* value) {
    dlpack::Tensor view;
    if (!read_view(value, &view)) throw std::invalid_argument("a value is not a plain tensor");
    Leaf leaf{Py_TYPE(value), view.dtype, {view.shape, view.shape + view.ndim}, false, false, false, {}, {}, {}};
    leaf.integer = find_int(view.dtype, &leaf.whole);
    if (!leaf.integer && !find_dtype(view.dtype, &leaf.real)) throw std::invalid_argument("a dtype is not known here");
    return leaf;
  }

  bool hold(PyObject* batch, Held* held) const {
    if (Py_TYPE(batch) != kind_) return false;
    held->owners.reserve(leaves_.size());
    held->views.resize(leaves_.size());
    Flag is_neg("is_neg");  // a view whose memory holds the opposite numbers
    size_t i = 0;
    const bool same = for_each_value(batch, [&](PyObject* key, PyObject* value) {
      if (i >= leaves_.size() || Py_TYPE(value) != leaves_[i].type) return false;
      if (key != nullptr && !same_key(key, keys_[i].ptr())) return false;
      if (!read_view(value, &held->views[i]) || !is_of(leaves_[i], held->views[i])) return false;
      if (leaves_[i].bounded && is_neg.of(value)) return false;
      held->owners.push_back(borrowed(value));
      held->bytes += count_elements(held->views[i].ndim, held->views[i].shape) * held->views[i].dtype.bits / 8;
      ++i;
      return true;
    });
    return same && i == leaves_.size();
  }

  static bool is_of(const Leaf& leaf, const dlpack::Tensor& view) {
    if (std::memcmp(&view.dtype, &leaf.dtype, sizeof(leaf.dtype)) != 0) return false;
    if (static_cast<size_t>(view.ndim) != leaf.shape.size()) return false;
    return std::equal(leaf.shape.begin(), leaf.shape.end(), view.shape) && is_on_host(view);
  }

  bool values_are_well(const Held& held) const {
    for (const Mask& m : masks_) {
      if (any_row_hidden(leaves_[m.leaf].whole, strided(held.views[m.leaf]), m.zero_hides)) return false;
    }
    for (const Within& w : within_) {
      const Leaf& leaf = leaves_[w.leaf];
      if (!(leaf.integer ? integers_within(leaf, w, held) : floats_within(leaf, w, held))) return false;
    }
    return magnitudes_are_well(held) && std::none_of(varying_.begin(), varying_.end(), [&](size_t i) {
             const int64_t bytes = element_bytes(leaves_[i].real);
             const StridedView view = strided(held.views[i]);
             return any_sample_alike(bytes, view, kFewPlaces) && any_sample_alike(bytes, view, kManyPlaces);
           });
  }

  static bool integers_within(const Leaf& leaf, const Within& w, const Held& held) {
    const IntRange range =
        int_range(leaf.whole, strided(held.views[w.leaf]), w.ignored.has_value() ? &*w.ignored : nullptr);
    return range.low <= range.high && w.low <= static_cast<double>(range.low) &&
           static_cast<double>(range.high) <= w.high;
  }

  static bool floats_within(const Leaf& leaf, const Within& w, const Held& held) {
    const StridedView view = strided(held.views[w.leaf]);
    Layout layout;
    const bool row_major = is_row_major(view.ndim, view.shape, view.strides);
    if (!row_major) layout = make_layout(view.ndim, view.shape, view.strides);
    const int64_t numel = row_major ? count_elements(view.ndim, view.shape) : layout.numel;
    const Ranges r = measure_ranges(leaf.real, view.data, numel, row_major ? nullptr : &layout);
    const double magnitude = std::max(std::fabs(r.low), std::fabs(r.high));
    return r.nan_count + r.inf_count == 0 && w.low <= r.low && r.high <= w.high && is_ordinary(leaf, magnitude);
  }

  static bool is_ordinary(const Leaf& leaf, double magnitude) {
    return std::none_of(leaf.odd_magnitudes.begin(), leaf.odd_magnitudes.end(),
                        [&](const Interval& odd) { return odd.first < magnitude && magnitude <= odd.second; });
  }

  bool magnitudes_are_well(const Held& held) const {
    std::vector<Entry> entries;
    std::vector<Layout> layouts;
    std::vector<const Leaf*> of_entry;
    for (size_t i = 0; i < leaves_.size(); ++i) {
      const Leaf& leaf = leaves_[i];
      if (!leaf.floating || leaf.bounded) continue;
      const StridedView view = strided(held.views[i]);
      Entry entry{view.data, count_elements(view.ndim, view.shape), 0, static_cast<uint32_t>(leaf.real),
                  Entry::kRowMajor};
      if (!is_row_major(view.ndim, view.shape, view.strides)) {
        entry.layout = static_cast<uint32_t>(layouts.size());
        layouts.push_back(make_layout(view.ndim, view.shape, view.strides));
        entry.numel = layouts.back().numel;
      }
      entries.push_back(entry);
      of_entry.push_back(&leaf);
    }
    if (entries.empty()) return true;
    CpuScan scan;
    scan_cpu(entries, layouts, entries.size(), scan);
    if (!scan.bad.empty()) return false;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (!is_ordinary(*of_entry[i], scan.rows[i].absmax)) return false;
    }
    return true;
  }

  PyTypeObject* kind_;  // a built-in one, which lives for ever
  std::vector<py::object> keys_;
  std::vector<Leaf> leaves_;
  std::vector<Within> within_;
  std::vector<Mask> masks_;
  std::vector<size_t> varying_;
};

}  // namespace

py::object make_batch_check(py::handle batch, const py::list& floats, const py::list& within, const py::list& masks,
                            const py::list& varying) {
  return make_function(std::make_unique<BatchCheck>(batch, floats, within, masks, varying));
}

}  // namespace nanscan
