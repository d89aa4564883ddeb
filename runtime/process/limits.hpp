#pragma once

// Resource limits of a process, and the errors when they are exhausted.

#include "transport/error.hpp"

#include <cstdint>
#include <exception>
#include <optional>

namespace smp {

/// Raises the soft limit of open files to the hard one, and makes a file that
/// grows too large an error instead of a signal.
void use_limits();

/// A process that runs out of descriptors or memory while libraries start up
/// dies inside one of them, without a message. So this checks before.
/// @throws error (config) naming the limit, its value and the value needed
void check_limits(uint64_t ranks);

/// @throws error (config) if the processes of this machine cannot reach each
/// other by its loopback interface
void check_loopback();

/// @returns an error (config) if `x` means that the system has no more memory,
/// threads or descriptors
std::optional<error> exhausted_limit(const std::exception& x);

} // namespace smp
