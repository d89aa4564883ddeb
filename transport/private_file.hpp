#pragma once

// Files that hold a secret: nobody but their user can read them, at any time.

#include <optional>
#include <string>

namespace smp {

/// @returns the content of a file of this user that nobody else can read, or
/// nothing, with errno set, if there is none
/// @throws error (config) if others can read it, or could have written it
std::optional<std::string> read_private_file(const std::string& path);

/// Makes a file of mode 0600 that appears at once and complete, and replaces
/// what an earlier run left there.
/// @returns 0, or errno
int write_private_file(const std::string& path, const std::string& text);

} // namespace smp
