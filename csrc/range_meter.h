// The hooks of a watched model: they measure what its modules return and the gradients of that.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "python_question.h"
#include "range_entries.h"

namespace nanscan {

struct GradientHook;

// What the hooks share. A hook answers for plain tensors of the host; all else is left to Python.
class RangeMeter : public std::enable_shared_from_this<RangeMeter> {
 public:
  // The tensor type that is served; that of the dicts in which PyTorch keeps a tensor's hooks; torch.is_grad_enabled;
  // what is called as (record, row, gradient) for gradients that are not served.
  RangeMeter(pybind11::object type, pybind11::object dict_type, pybind11::object grad_enabled,
             pybind11::object take_other);

  void begin(pybind11::object record, std::shared_ptr<RangeEntries> entries);
  void end();
  void clear() { seen_.clear(); }
  void close();

  // True the first time that a tensor comes in this state (version). Tensors are not kept alive.
  bool is_new(pybind11::handle tensor);

  // A function of one argument, a module's output, that measures it and has its gradient measured. It returns False
  // where Python has to look at it.
  pybind11::object hook(int32_t row);

  // `call` with a look at each result, as `hook` has it; `other` is called with those where Python has to look.
  pybind11::object watched_call(int32_t row, pybind11::object call, pybind11::object other);

  bool take(int32_t row, PyObject* output);
  void take_gradient(RangeEntries& entries, pybind11::handle record, int32_t row, PyObject* grad);

 private:
  struct Known {
    pybind11::object tensor;  // a weak reference
    int64_t state;
  };

  bool is_plain(PyObject* object) const;
  void hang(GradientHook hook, PyObject* tensor, PyObject* node) const;

  pybind11::object type_;
  Question version_, is_neg_, requires_grad_, grad_fn_, hooks_;
  pybind11::object dict_type_, grad_enabled_, take_other_;
  pybind11::object record_ = pybind11::none();  // of the step whose forward runs
  std::shared_ptr<RangeEntries> entries_;       // its
  std::unordered_map<PyObject*, Known> seen_;
  bool closed_ = false;
};

}  // namespace nanscan
