#pragma once

#include "transport/error.hpp"

#include <caf/error.hpp>

#include <chrono>
#include <string>
#include <utility>

namespace smp {

/// Tells whether `x` means that the actor ended before it answered; its down
/// message then has the reason.
bool has_ended(const caf::error& x);

/// @returns the meaning of an error that a schedule actor sent instead of an
/// answer: a code and a predicate, "threw: out of range".
std::pair<error_code, std::string> explain(const caf::error& x,
                                           std::chrono::milliseconds timeout);

} // namespace smp
