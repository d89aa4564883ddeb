#pragma once

#include "runtime/config/config_file.hpp"
#include "runtime/model/module_walk.hpp"

#include <cstdint>
#include <functional>
#include <string>

namespace smp {

/// What training some tensors of a model takes, whatever the batch: themselves,
/// the gradients of those that are trained, and what the optimizer keeps.
/// @param owned takes a position in `model.tensors`
/// @returns bytes of one rank
uint64_t memory_need(const walked_model& model, const train_config& x,
                     const std::function<bool(uint32_t)>& owned);

/// @returns "603 MB for parameters, gradients and the state of sgd, activations
/// come on top"
std::string describe_memory_need(uint64_t bytes, const optimizer_config& x);

} // namespace smp
