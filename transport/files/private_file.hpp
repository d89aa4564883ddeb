#pragma once

// Files that hold a secret: only their user can read them, at any time.

#include <optional>
#include <string>

namespace smp {

/// @returns the content of a file of this user that no other user can read, or
/// nothing, with errno set, if there is none
/// @throws error (config) if other users can read or could have written it
std::optional<std::string> read_private_file(const std::string& path);

/// Writes a file of mode 0600, which appears at once and complete, and replaces
/// the one that an earlier run left there.
/// @returns 0, or errno
int write_private_file(const std::string& path, const std::string& text);

} // namespace smp
