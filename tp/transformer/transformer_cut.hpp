#pragma once

#include "tp/distributed_module.hpp"

#include <string>

namespace smp::nn {

/// @returns the slices that peer `rank` of `peers` holds of the parameters of a
/// transformer layer: of linears inputs or outputs, of norms channels if that
/// saves memory
parameter_slices slices_of_layer(const native_module& x, int64_t rank,
                                 int64_t peers);

/// @returns why a transformer layer cannot be shared by `peers`: what
/// does not divide, or parameters that do not match its options; or
/// nothing
std::string refusal_of_layer(const native_module& x, int64_t peers);

} // namespace smp::nn
