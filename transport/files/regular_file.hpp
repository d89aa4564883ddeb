#pragma once

// Files that a run reads at its start.

#include "transport/files/file_descriptor.hpp"

#include <string>

namespace smp {

/// Opens a regular file to read. Anything else is refused at once: to open or
/// to read a pipe waits, perhaps forever, for somebody who writes to it.
/// @param why gets what is wrong: "No such file or directory", "is not a
/// regular
///        file"
/// @returns none, with errno set, if it cannot be opened or is something else
file_descriptor open_regular(const std::string& path, std::string& why);

} // namespace smp
