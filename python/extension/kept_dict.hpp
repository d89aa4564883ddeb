#pragma once

#include "python/extension/kept_value.hpp"
#include "runtime/model/module_facts.hpp"

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace smp::python {

/// The attributes of a Python module, and which tensors are its buffers.
class kept_dict final : public kept_attributes {
public:
  /// With the lock.
  kept_dict(const py::object& module, kept_value::purpose why);

  ~kept_dict() override;

  std::string changes() const override;
  void put_back(map_changes* changes) override;

private:
  /// @returns the names of attributes that are new
  std::vector<py::object> made() const;
  void put_back_buffers(map_changes* changes);

  py::object module_;
  kept_value::purpose why_;
  std::vector<std::pair<py::object, kept_value>> entries_;
  std::optional<kept_value> buffers_; // of the dict
};

} // namespace smp::python
