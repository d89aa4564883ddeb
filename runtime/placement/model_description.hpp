#pragma once

#include "partition/module_tree.hpp"
#include "runtime/model/module_order.hpp"
#include "runtime/model/module_walk.hpp"

#include <cstdint>
#include <map>

namespace smp {

/// @param pins manual placement of modules without a hook, by object
/// @returns what the partition must know of a model before anything is measured
model_info describe(const walked_model& model,
                    const std::map<const void*, uint32_t>& pins,
                    const module_order& order);

/// @returns the mean size of an element of the model's parameters, in bytes
double element_bytes(const walked_model& model);

} // namespace smp
