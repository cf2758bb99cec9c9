// Reads tensors of a Python framework through its DLPack table: which memory, which type, which layout.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dlpack_abi.h"
#include "layout.h"
#include "python_objects.h"
#include "python_types.h"
#include "scan_cpu.h"

namespace nanscan {

// A tensor is well-formed, but of a dtype or device that this engine does not read: another engine must.
struct Unserved : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The unique tensors on one device, in order of position.
struct DeviceGroup {
  dlpack::Device device;
  std::vector<Entry> entries;
  std::vector<int32_t> positions;  // of each entry
  std::vector<PyObject*> owners;   // of each entry: the tensor whose memory is read, kept alive (strong reference)
  size_t counted = SIZE_MAX;       // entries before the extra ones

  void reserve(size_t count) {
    entries.reserve(count);
    positions.reserve(count);
    owners.reserve(count);
  }
};

// Everything one scan reads. It keeps the tensors alive and must not outlive the call that made it.
class Gathered {
 public:
  static constexpr int kBatch = 16;  // tensors that are looked at side by side

  // `resolve(position, tensor)` is asked for tensors that the table does not serve; it returns one that it does, or
  // raises.
  explicit Gathered(pybind11::object resolve) : resolve_(std::move(resolve)) {}
  ~Gathered();
  Gathered(const Gathered&) = delete;
  Gathered& operator=(const Gathered&) = delete;

  void add_tensors(pybind11::handle tensors);            // any sequence; None is skipped
  void add_gradients_of(pybind11::handle param_groups);  // list of dicts with "params"
  void end_of_counted();                                 // what follows joins the counts, not the norms

  // Flat logical index of the first NaN/Inf of an entry, read again in logical order.
  int64_t first_bad_logical(const DeviceGroup& group, size_t entry) const;

  // True if autograd follows a tensor (a gradient made with create_graph=True): it must hear of every change in place.
  bool any_requires_grad() const;

  // True if every tensor is a plain one, gap-free, and shares its memory with no other: each can be changed as flat
  // memory.
  bool all_separate() const;

  // Shape and strides of an entry's tensor.
  void shape_of(const DeviceGroup& group, size_t entry, std::vector<int64_t>* shape,
                std::vector<int64_t>* strides) const;

  std::vector<DeviceGroup> groups;  // in the order in which devices were met
  std::vector<Layout> layouts;
  std::vector<std::pair<int32_t, int32_t>> duplicates;  // position, position of the first occurrence
  std::vector<int32_t> resolved;                        // positions that went through `resolve`
  int64_t numel = 0;                                    // logical elements of the counted entries
  int64_t bytes = 0;                                    // of all entries
  uint64_t signature = 0;                               // of the identities walked

 private:
  struct Batch;

  void reserve(size_t count);
  void add_batch(Batch& batch);
  void add(PyObject* owned_tensor);
  void add_resolved(PyObject* tensor);
  void add_view(const dlpack::Tensor& view, DType dtype, int64_t count, PyObject* owned_tensor);
  void add_entry(const dlpack::Tensor& view, DType dtype, int64_t count, PyObject* owned_tensor);
  DeviceGroup& group_for(const dlpack::Device& device);
  uint32_t* find_slot(const dlpack::Tensor& view);
  void grow_table();

  pybind11::object resolve_;
  std::vector<uint32_t> table_;  // open addressing by data pointer: group << kEntryBits | entry, kEmpty
  size_t used_ = 0;
  std::unordered_map<PyObject*, int32_t> odd_;  // objects without memory of their own to be known by -> first position
  std::vector<pybind11::object> odd_owners_;    // keeps their addresses taken
  size_t expected_ = 0;                         // tensors announced before a device was met
  size_t current_ = 0;                          // the group used last
  int32_t position_ = 0;
  bool extra_ = false;
};

// The memory of one tensor; false: not on the host, of a dtype unknown here, or not served by a table.
bool host_tensor(pybind11::handle tensor, dlpack::Tensor* view, DType* dtype, int64_t* count);

// True if the elements lie in the host's memory, and that memory is there.
bool is_on_host(const dlpack::Tensor& view);

// Pointer to the memory of a tensor object that a registered table serves.
void* data_pointer(pybind11::handle tensor);

}  // namespace nanscan
