#pragma once

// Numbers as people read them.

#include <cstdint>
#include <string>
#include <string_view>

namespace smp::app {

/// @returns "1,234,567".
std::string with_commas(uint64_t x);

/// @returns "0.82 s", "12 s", "1m05s", "2h03m".
std::string duration_text(double seconds);

/// @returns samples or tokens per second in three digits or more: "0.417",
/// "35.1", "28174".
std::string rate_text(double per_second);

/// @returns `x`; what is not a number has no sign, as that depends on the
/// machine.
double plain_number(double x);

/// @returns "817 B", "1.21 MB", "3.40 GB"; powers of 1000.
std::string bytes_text(uint64_t x);

/// @param x letters of ASCII
std::string in_capitals(std::string x);

/// Makes bytes fit for a terminal: invalid UTF-8 and control characters other
/// than line breaks become U+FFFD.
std::string printable(std::string_view bytes);

} // namespace smp::app
