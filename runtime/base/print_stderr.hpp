#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace smp {

/// Writes to stderr, on a line of its own if something else, as the progress of
/// a step, stands at the beginning of the last one.
/// @returns false if it was not written
bool write_stderr(std::string_view text);

/// Tells `write_stderr` what the console shows that others wrote.
void note_console(std::string_view text);

/// Writes to stderr, see `write_stderr`. `fmt::print` throws if stderr cannot
/// be written, as with a log on a full disk: a caller that is about to report
/// an error would end with that exception instead, without a message.
/// @returns false if it was not written
template <class... Ts>
bool print_stderr(fmt::format_string<Ts...> format, Ts&&... xs) {
  return write_stderr(fmt::format(format, std::forward<Ts>(xs)...));
}

} // namespace smp
