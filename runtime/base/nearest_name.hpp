#pragma once

// Suggestions for mistyped names.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace smp {

/// Lower case without '_' and '-', which users mix up anyway.
std::string folded_name(std::string_view x);

/// Insertions, deletions, replacements and swaps of neighbours between `x` and
/// `y` (optimal string alignment distance).
size_t typing_distance(std::string_view x, std::string_view y);

/// The number of typing errors to tolerate in a word of this length.
size_t typing_tolerance(std::string_view x);

/// @returns the name that `x` most likely means; empty if none is close
std::string_view nearest_name(std::string_view x,
                              std::span<const std::string_view> names);

} // namespace smp
