#pragma once

#include "runtime/model/module_walk.hpp"

#include <c10/core/ScalarType.h>

#include <optional>

namespace smp {

struct session_config;

/// @returns the parameter type that the configuration requests (R56); nullopt
/// if parameters keep their types
std::optional<c10::ScalarType> parameter_type(const session_config& x);

/// Converts all floating-point parameters and buffers of a model to `type`, as
/// `torch::nn::Module::to` does: they stay the same objects. Deferred ones,
/// without bytes yet, are cast when they are allocated.
void cast_parameters(const walked_model& model, c10::ScalarType type);

} // namespace smp
