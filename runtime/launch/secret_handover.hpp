#pragma once

// How the secret of a run reaches its ranks: as a descriptor that they inherit
// from our launcher, or as a file that only their user can read.

#include "runtime/launch/environment.hpp"
#include "transport/file_descriptor.hpp"
#include "transport/run_secret.hpp"

#include <optional>
#include <string>

namespace smp {

/// Variable of a rank: the number of the descriptor that holds the secret.
inline constexpr const char* secret_descriptor_variable = "SMP_SECRET_FD";

/// Variable of the user: the file that holds the secret, for ranks that neither
/// our launcher started nor share a directory.
inline constexpr const char* secret_file_variable = "SMP_SECRET_FILE";

/// @returns a file in memory, without a name, that holds `x`
file_descriptor secret_descriptor(const run_secret& x);

/// @returns the secret that this process was given, if it was given one. Can be
/// asked again; what this process executes does not get it any more.
/// @throws error (config) if what was given is none, if others can read it, or
/// if our launcher started this rank and gave it none
std::optional<run_secret> given_secret(const rank_environment& x);

} // namespace smp
