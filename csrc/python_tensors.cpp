#include "python_tensors.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu_kernels.h"

namespace py = pybind11;

namespace nanscan {
namespace {

constexpr uint32_t kEmpty = 0xffffffff;
constexpr int kEntryBits = 26;  // 67 million tensors on each of 63 devices

bool is_host(dlpack::DeviceType t) { return t == dlpack::kDLCPU || t == dlpack::kDLCUDAHost; }

bool has_memory(const dlpack::Tensor& view) {
  return reinterpret_cast<uintptr_t>(view.data) + view.byte_offset >= lowest_allocation();
}

bool readable(const dlpack::Tensor& view, DType* dtype, int64_t numel) {
  if (!is_host(view.device.device_type) && view.device.device_type != dlpack::kDLCUDA) return false;
  return find_dtype(view.dtype, dtype) && (has_memory(view) || numel == 0);
}

uint64_t mix(uint64_t key) {
  key ^= key >> 32;
  key *= 0x9e3779b97f4a7c15ull;
  return key ^ (key >> 29);
}

bool same_tensor(PyObject* owner, const dlpack::Tensor& view) {
  dlpack::Tensor other;
  if (!read_view(owner, &other) || data_of(other) != data_of(view) || other.ndim != view.ndim) return false;
  if (std::memcmp(&other.dtype, &view.dtype, sizeof(view.dtype)) != 0) return false;
  const size_t bytes = sizeof(int64_t) * static_cast<size_t>(view.ndim);
  if (std::memcmp(other.shape, view.shape, bytes) != 0) return false;
  if (other.strides == nullptr || view.strides == nullptr) return other.strides == view.strides;
  return std::memcmp(other.strides, view.strides, bytes) == 0;
}

}  // namespace

Gathered::~Gathered() {
  for (DeviceGroup& group : groups) {
    for (PyObject* owner : group.owners) Py_DECREF(owner);
  }
}

void Gathered::reserve(size_t count) {
  if (groups.empty()) expected_ = count;  // for the first device that is met
  if (groups.size() == 1) groups[0].reserve(groups[0].entries.size() + count);
  while ((used_ + count) * 5 > table_.size() * 4) grow_table();
}

void Gathered::grow_table() {
  std::vector<uint32_t> old(table_.empty() ? 16 : table_.size() * 2, kEmpty);
  old.swap(table_);
  const size_t mask = table_.size() - 1;
  for (uint32_t value : old) {
    if (value == kEmpty) continue;
    const DeviceGroup& group = groups[value >> kEntryBits];
    size_t slot = mix(reinterpret_cast<uintptr_t>(group.entries[value & ((1u << kEntryBits) - 1)].data)) & mask;
    while (table_[slot] != kEmpty) slot = (slot + 1) & mask;
    table_[slot] = value;
  }
}

// The slot of this tensor: holding its first occurrence, or empty.
uint32_t* Gathered::find_slot(const dlpack::Tensor& view) {
  if ((used_ + 1) * 5 > table_.size() * 4) grow_table();
  const size_t mask = table_.size() - 1;
  const char* data = data_of(view);
  for (size_t slot = mix(reinterpret_cast<uintptr_t>(data)) & mask;; slot = (slot + 1) & mask) {
    const uint32_t value = table_[slot];
    if (value == kEmpty) return &table_[slot];
    const DeviceGroup& group = groups[value >> kEntryBits];
    const size_t entry = value & ((1u << kEntryBits) - 1);
    if (group.entries[entry].data == data && same_tensor(group.owners[entry], view)) return &table_[slot];
  }
}

DeviceGroup& Gathered::group_for(const dlpack::Device& device) {
  const dlpack::Device key = is_host(device.device_type) ? dlpack::Device{dlpack::kDLCPU, 0} : device;
  auto is_key = [&](const DeviceGroup& g) {
    return g.device.device_type == key.device_type && g.device.device_id == key.device_id;
  };
  if (current_ < groups.size() && is_key(groups[current_])) return groups[current_];
  for (current_ = 0; current_ < groups.size(); ++current_) {
    if (is_key(groups[current_])) return groups[current_];
  }
  groups.push_back({key, {}, {}, {}, extra_ ? 0 : SIZE_MAX});
  if (groups.size() == 1) groups[0].reserve(expected_);
  return groups.back();
}

void Gathered::end_of_counted() {
  extra_ = true;
  for (DeviceGroup& group : groups) group.counted = group.entries.size();
}

void Gathered::add_entry(const dlpack::Tensor& view, DType dtype, int64_t count, PyObject* owned_tensor) {
  DeviceGroup& group = group_for(view.device);
  Entry entry{data_of(view), count, 0, static_cast<uint32_t>(dtype), Entry::kRowMajor};
  if (!extra_) numel += entry.numel;
  if (!is_row_major(view.ndim, view.shape, view.strides)) {
    layouts.push_back(make_layout(view.ndim, view.shape, view.strides));
    entry.numel = layouts.back().numel;
    entry.layout = static_cast<uint32_t>(layouts.size() - 1);
  }
  bytes += entry.bytes();
  group.entries.push_back(entry);
  group.positions.push_back(position_);
  group.owners.push_back(owned_tensor);
}

void Gathered::add_view(const dlpack::Tensor& view, DType dtype, int64_t count, PyObject* owned_tensor) {
  if (count == 0) {  // an empty tensor has no memory to be known by
    auto [seen, fresh] = odd_.try_emplace(owned_tensor, position_);
    if (fresh) return add_entry(view, dtype, count, owned_tensor);
    duplicates.emplace_back(position_, seen->second);
    Py_DECREF(owned_tensor);
    return;
  }
  uint32_t* slot = find_slot(view);
  if (*slot != kEmpty) {
    const DeviceGroup& group = groups[*slot >> kEntryBits];
    duplicates.emplace_back(position_, group.positions[*slot & ((1u << kEntryBits) - 1)]);
    Py_DECREF(owned_tensor);
    return;
  }
  add_entry(view, dtype, count, owned_tensor);
  *slot = static_cast<uint32_t>(current_) << kEntryBits | static_cast<uint32_t>(groups[current_].entries.size() - 1);
  ++used_;
}

// A tensor that the table does not serve: Python names the memory that holds its elements.
void Gathered::add_resolved(PyObject* tensor) {
  auto [seen, fresh] = odd_.try_emplace(tensor, position_);
  if (!fresh) {
    duplicates.emplace_back(position_, seen->second);
    return;
  }
  resolved.push_back(position_);
  py::object plain = call(resolve_, {py::int_(position_), borrowed(tensor)});
  dlpack::Tensor view;
  DType dtype;
  if (!read_view(plain.ptr(), &view)) throw Unserved("this layout or device");
  const int64_t count = count_elements(view.ndim, view.shape);
  if (!readable(view, &dtype, count)) throw Unserved("this dtype or device");
  // A tensor of ordinary layout is known by its memory. The values of a sparse one are not: two may share them and
  // differ in their rows.
  py::object layout = py::getattr(py::handle(tensor), "layout", py::none());
  if (layout.ptr() == type_of(plain.ptr())->strided) return add_view(view, dtype, count, plain.release().ptr());
  add_entry(view, dtype, count, plain.release().ptr());
}

// Takes over the reference to `tensor`.
void Gathered::add(PyObject* tensor) {
  dlpack::Tensor view;
  DType dtype;
  if (read_view(tensor, &view)) {
    const int64_t count = count_elements(view.ndim, view.shape);
    if (readable(view, &dtype, count)) return add_view(view, dtype, count, tensor);
  }
  odd_owners_.push_back(py::reinterpret_steal<py::object>(tensor));
  add_resolved(tensor);
}

// A few tensors of a list, with references of their own, and what their tables say of them. Each look at one waits for
// memory; side by side they wait together.
struct Gathered::Batch {
  static constexpr Py_ssize_t kMost = kBatch;
  Py_ssize_t taken = 0, count = 0;
  PyObject* items[kMost];
  dlpack::Tensor views[kMost];
  DType dtypes[kMost];
  int64_t counts[kMost];

  Batch() = default;
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
  ~Batch() {
    for (; taken < count; ++taken) Py_DECREF(items[taken]);
  }
  void push(PyObject* owned_tensor) { items[count++] = owned_tensor; }
  PyObject* take() { return items[taken++]; }

  // Looks at the next tensors until one that the table does not serve; returns its index.
  Py_ssize_t look() {
    Py_ssize_t i = taken;
    for (; i < count; ++i) {
      if (items[i] == Py_None) continue;
      if (!read_view(items[i], &views[i])) break;
      counts[i] = count_elements(views[i].ndim, views[i].shape);
      if (!readable(views[i], &dtypes[i], counts[i])) break;
    }
    return i;
  }
};

void Gathered::add_batch(Batch& batch) {
  while (batch.taken < batch.count) {
    const Py_ssize_t served = batch.look();  // what comes next runs no Python code, so what was seen stays true
    for (Py_ssize_t i = batch.taken; i < served; ++i, ++position_) {
      PyObject* tensor = batch.take();
      tensor == Py_None ? Py_DECREF(tensor) : add_view(batch.views[i], batch.dtypes[i], batch.counts[i], tensor);
    }
    if (batch.taken == batch.count) return;
    add(batch.take());
    ++position_;
  }
}

void Gathered::add_tensors(py::handle tensors) {
  py::object fast = py::reinterpret_steal<py::object>(PySequence_Fast(tensors.ptr(), "tensors must be a sequence"));
  if (!fast) throw py::error_already_set();
  reserve(static_cast<size_t>(PySequence_Fast_GET_SIZE(fast.ptr())));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast.ptr());) {
    Batch batch;
    for (; batch.count < Batch::kMost && i < PySequence_Fast_GET_SIZE(fast.ptr()); ++i) {
      PyObject* tensor = PySequence_Fast_GET_ITEM(fast.ptr(), i);
      signature = mix(signature ^ reinterpret_cast<uintptr_t>(tensor));
      Py_INCREF(tensor);
      batch.push(tensor);
    }
    add_batch(batch);
  }
}

static PyObject* gradient_of(PyObject* param) {
  static PyObject* const name = PyUnicode_InternFromString("grad");
  const TensorType* t = type_of(param);
  if (t != nullptr && t->shortcuts != nullptr) {
    return t->shortcuts->wrap(t->shortcuts->grad(TorchShortcuts::impl_of(param)));
  }
  return t != nullptr && t->grad != nullptr ? t->grad->get(param, t->grad->closure) : PyObject_GetAttr(param, name);
}

// Brings to the cache what the next parameters' gradients are found by, one link of each chain after the other, so that
// all wait together. Nothing that it sees is kept: the exact look comes after it. `kLinks` says where an impl is
// expected to hold its storage and its Python object; where it does not, a line of memory is asked for in vain.
static void touch_gradients(PyObject* params, Py_ssize_t from, Py_ssize_t count) {
  constexpr int kLinks[] = {16, 48, 56};
  const char* impls[Gathered::kBatch];
  const TorchShortcuts* shortcuts[Gathered::kBatch];
  const Py_ssize_t n = std::min(PySequence_Fast_GET_SIZE(params) - from, count);
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* param = PySequence_Fast_GET_ITEM(params, from + i);
    const TensorType* t = type_of(param);
    shortcuts[i] = t == nullptr ? nullptr : t->shortcuts;
    if (shortcuts[i] == nullptr) return;
    impls[i] = static_cast<const char*>(TorchShortcuts::impl_of(param));
    __builtin_prefetch(impls[i]);
  }
  for (Py_ssize_t i = 0; i < n; ++i) {
    impls[i] = *static_cast<const char* const*>(shortcuts[i]->grad(impls[i]));
    for (int line = 0; line < 4; ++line) __builtin_prefetch(impls[i] + line * 64);
  }
  for (Py_ssize_t i = 0; i < n; ++i) {
    for (const int link : kLinks) __builtin_prefetch(*reinterpret_cast<const char* const*>(impls[i] + link));
  }
}

void Gathered::add_gradients_of(py::handle param_groups) {
  for (py::handle group : param_groups) {
    py::object held = group["params"];
    py::object params = py::reinterpret_steal<py::object>(PySequence_Fast(held.ptr(), "params must be a sequence"));
    if (!params) throw py::error_already_set();
    reserve(static_cast<size_t>(PySequence_Fast_GET_SIZE(params.ptr())));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(params.ptr());) {
      Batch batch;
      touch_gradients(params.ptr(), i, Batch::kMost);
      for (; batch.count < Batch::kMost && i < PySequence_Fast_GET_SIZE(params.ptr()); ++i) {
        PyObject* param = PySequence_Fast_GET_ITEM(params.ptr(), i);
        signature = mix(signature ^ reinterpret_cast<uintptr_t>(param));
        PyObject* grad = gradient_of(param);
        if (grad == nullptr) throw py::error_already_set();
        batch.push(grad);
      }
      add_batch(batch);
    }
  }
}

int64_t Gathered::first_bad_logical(const DeviceGroup& group, size_t entry) const {
  dlpack::Tensor view;
  if (!read_view(group.owners[entry], &view)) return -1;
  const DType dtype = group.entries[entry].type();
  auto is_bad = [](const void* type, const char* element) {
    return is_nonfinite(*static_cast<const DType*>(type), element);
  };
  return find_first(view.ndim, view.shape, view.strides, data_of(view), element_bytes(dtype), is_bad, &dtype);
}

bool Gathered::any_requires_grad() const {
  for (const DeviceGroup& group : groups) {
    for (PyObject* owner : group.owners) {
      const TensorType* t = type_of(owner);
      if (t != nullptr && t->shortcuts != nullptr) {
        if (t->shortcuts->requires_grad(TorchShortcuts::impl_of(owner))) return true;
        continue;
      }
      if (t == nullptr || t->requires_grad == nullptr) return true;  // not known: be careful
      PyObject* answer = t->requires_grad->get(owner, t->requires_grad->closure);
      if (answer == nullptr) throw py::error_already_set();
      Py_DECREF(answer);
      if (answer != Py_False) return true;
    }
  }
  return false;
}

bool Gathered::all_separate() const {
  const auto has_gaps = [](const Layout& layout) { return !layout.flat || layout.repeat != 1; };
  return duplicates.empty() && resolved.empty() && std::none_of(layouts.begin(), layouts.end(), has_gaps);
}

void Gathered::shape_of(const DeviceGroup& group, size_t entry, std::vector<int64_t>* shape,
                        std::vector<int64_t>* strides) const {
  dlpack::Tensor view;
  if (!read_view(group.owners[entry], &view)) return;
  shape->assign(view.shape, view.shape + view.ndim);
  strides->assign(view.strides, view.strides + view.ndim);
}

bool host_tensor(py::handle tensor, dlpack::Tensor* view, DType* dtype, int64_t* count) {
  if (!read_view(tensor.ptr(), view) || !is_host(view->device.device_type)) return false;
  *count = count_elements(view->ndim, view->shape);
  return readable(*view, dtype, *count);
}

bool is_on_host(const dlpack::Tensor& view) { return is_host(view.device.device_type) && has_memory(view); }

void* data_pointer(py::handle tensor) {
  dlpack::Tensor view;
  if (!read_view(tensor.ptr(), &view)) throw std::invalid_argument("not a tensor that the DLPack table serves");
  return static_cast<char*>(view.data) + view.byte_offset;
}

}  // namespace nanscan
