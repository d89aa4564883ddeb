#pragma once

#include "actors/protocol/request.hpp"

namespace smp {

class execution;

/// Runs what another rank asks of the modules of this one: forward calls and
/// ranges, their backward, reads of parameters, gradients for them.
/// @returns the body of the response
/// @throws whatever the user's module throws; error (protocol) if `x` is no
/// request that a correct rank sends
payload serve(execution& ex, const request& x);

} // namespace smp
