#pragma once

// How the secret of a run reaches its ranks: as a descriptor that they inherit
// from our launcher, or as a file that only their user can read.

#include "runtime/launch/environment.hpp"
#include "transport/files/file_descriptor.hpp"
#include "transport/files/run_secret.hpp"

#include <optional>
#include <string>

namespace smp {

/// Variable of a rank: the number of the descriptor that holds the secret.
inline constexpr const char* secret_descriptor_variable = "SMP_SECRET_FD";

/// Variable of the user: the file that holds the secret, for ranks that our
/// launcher did not start and that share no directory.
inline constexpr const char* secret_file_variable = "SMP_SECRET_FILE";

/// @returns an anonymous file in memory that holds `x`
file_descriptor secret_descriptor(const run_secret& x);

/// @returns the secret given to this process, if any. Can be called again;
/// programs that this process executes do not inherit it.
/// @throws error (config) if what was given is not a secret, if others can read
/// it, or if our launcher started this rank without one
std::optional<run_secret> given_secret(const rank_environment& x);

} // namespace smp
