#pragma once

#include <string>

namespace smp {

/// @returns what the error number `x` means, as "No space left on device"; of a
/// file that becomes too large, the limit as well
std::string errno_text(int x);

} // namespace smp
