#pragma once

#include "actors/protocol/request.hpp"

namespace smp {

class running_call;

/// Serves a request of another rank for modules of this one: forward calls and
/// ranges, their backward, parameter reads, gradients of parameters.
/// @returns the body of the response
/// @throws whatever the user's module throws; error (protocol) if `x` is not a
/// request that a correct rank sends
payload serve(running_call& ex, const request& x);

} // namespace smp
