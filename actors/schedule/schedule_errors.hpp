#pragma once

#include "transport/error.hpp"

#include <caf/error.hpp>

#include <chrono>
#include <string>
#include <utility>

namespace smp {

/// Tells whether `x` means that the actor ended before it answered: why is then
/// the matter of its down message.
bool has_ended(const caf::error& x);

/// @returns what it means that a schedule actor sent this instead of an answer:
/// code and predicate, "threw: out of range".
std::pair<error_code, std::string> explain(const caf::error& x,
                                           std::chrono::milliseconds timeout);

} // namespace smp
