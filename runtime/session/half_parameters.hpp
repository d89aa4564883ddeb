#pragma once

#include "runtime/model/module_walk.hpp"

#include <c10/core/ScalarType.h>

#include <optional>

namespace smp {

struct session_config;

/// @returns the type of parameters that the configuration wants (R56); nothing
/// if they stay what they are
std::optional<c10::ScalarType> parameter_type(const session_config& x);

/// Makes all floating-point parameters and buffers of a model ones of `type`,
/// as `torch::nn::Module::to` does: they stay the same objects. What has no
/// bytes yet is cast when it gets them.
void cast_parameters(const walked_model& model, c10::ScalarType type);

} // namespace smp
