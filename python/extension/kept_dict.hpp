#pragma once

#include "python/extension/interpreter.hpp"
#include "runtime/model/module_facts.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace smp::python {

/// The attributes of a Python module: values, and of lists, dicts and sets also
/// their items. Of other objects only which ones they are.
class kept_dict final : public kept_attributes {
public:
  /// With the lock.
  explicit kept_dict(const py::object& module);

  ~kept_dict() override;

  std::string changes() const override;
  void put_back(model_map* map) override;

private:
  struct entry {
    py::object name;
    py::object content;
    /// A copy of a list, dict or set; none for others.
    py::object items;
    /// Of a tensor: a copy if it is small, and autograd's counter.
    at::Tensor tensor;
    uint32_t version = 0;
  };

  bool changed(const entry& x, PyObject* now) const;
  /// @returns the names of attributes that are new
  std::vector<py::object> made() const;
  void put_back(const entry& x);

  py::object module_;
  std::vector<entry> entries_;
  py::object buffers_; // a copy of the dict
};

/// @returns which attributes traces have changed since the last call: pairs of
/// a module and a name. With the lock.
py::list take_traced_changes();

} // namespace smp::python
