#pragma once

#include "python/extension/interpreter.hpp"

namespace smp {
class distributed_model_base;
class distributed_optimizer;
} // namespace smp

namespace smp::python {

/// @param x `smp._core.Model`
distributed_model_base& model_of(py::handle x);

/// @param x `smp._core.Optimizer`
distributed_optimizer& optimizer_of(py::handle x);

void bind_model(py::module_& m);

/// Sessions, groups and what ranks exchange.
void bind_session(py::module_& m);

/// Steps and their results.
void bind_step(py::module_& m);

void bind_checkpoint(py::module_& m);

/// The random numbers of Python and numpy.
void bind_generators(py::module_& m);

/// Comparing a step with one process.
void bind_verify(py::module_& m);

} // namespace smp::python
