#pragma once

#include "runtime/model/call_translation.hpp"
#include "runtime/model/module_walk.hpp"
#include "tp/distributed_module.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace smp {

/// What tensor-parallel ranks must know about a module to share it: one of
/// torch::nn, or a TorchScript module of torch.nn.
/// @returns nothing if it is of another class
std::optional<native_module> native_of(const walked_model& model,
                                       uint32_t module);

/// @returns the translation between calls of a class that was registered with
/// hooks and those of its distributed module; null: there is none
const call_translation* translation_of(const walked_module& x);

/// The same for a class of TorchScript files.
std::shared_ptr<const script_translation>
script_translation_of(const walked_module& x);

/// @returns how to build the result of a call of a class that was registered
/// without hooks; null: it is one tensor
child_result result_of(const walked_module& x);

/// @returns the position of a parameter that the module, or one below it, has
/// under this name ("weight", "attn.c_attn.weight"), or nothing
std::optional<uint32_t> own_tensor(const walked_model& model, uint32_t module,
                                   const std::string& name);

} // namespace smp
