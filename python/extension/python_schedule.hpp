#pragma once

#include "python/extension/interpreter.hpp"

#include <memory>

namespace smp {
class schedule_actor_type;
} // namespace smp

namespace smp::python {

/// @param x a class derived from `smp.Schedule`, of which each actor makes an
///        instance
std::shared_ptr<const schedule_actor_type> schedule_type_of(py::object x);

void bind_schedule(py::module_& m);

} // namespace smp::python
