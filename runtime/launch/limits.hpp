#pragma once

// What the system allows a process, and what it does when that is used up.

#include "transport/error.hpp"

#include <cstdint>
#include <exception>
#include <optional>

namespace smp {

/// Takes as many open files as this process may have, and lets a file that is
/// too large be an error instead of a signal.
void use_limits();

/// A process that runs out of descriptors or memory while libraries start up
/// ends in one of them, without a word. So that is looked at before.
/// @throws error (config) naming the limit, what it is and what is wanted
void check_limits(uint64_t ranks);

/// @returns an error (config) if `x` says that the system gives no more memory,
/// threads or descriptors
std::optional<error> exhausted_limit(const std::exception& x);

} // namespace smp
