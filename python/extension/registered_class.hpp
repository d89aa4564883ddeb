#pragma once

// Classes that the program registered with `smp.tp_register`: ranks share their
// modules by objects of another class of the program.

#include "python/extension/interpreter.hpp"
#include "runtime/sharing/tp_register.hpp"

#include <memory>
#include <string>

namespace smp::python {

/// What stands for a module of a registered class on this rank.
struct registered_module {
  /// The distributed class: "ParallelMLP".
  std::string type;
  /// Why ranks do not share the module; empty: they do.
  std::string doubt;
  parameter_axes axes = {};
  /// See `scaled_batch` of `smp.tp_register`.
  bool scaled_batch = true;
  /// `smp._registered.StandIn`; null if there is a doubt.
  std::shared_ptr<shared_object> object = {};

  /// Runs this rank's part of a call. With the lock.
  /// @throws py::error_already_set from the program's code, error (user_code)
  py::object operator()(const py::tuple& args, const py::dict& kwargs) const;
};

/// @returns what runs the calls of a shared module, if its class is registered;
/// else null
const registered_module* registered_in(const distributed_module& x);

void bind_registered(py::module_& m);

} // namespace smp::python
