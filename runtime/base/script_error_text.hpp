#pragma once

#include <string>

namespace smp {

/// TorchScript wraps an exception into a report of several lines, with the
/// cause at the end. @returns the cause and its place in the code; text without
/// such a report is returned unchanged.
std::string script_error_text(const std::string& x);

} // namespace smp
