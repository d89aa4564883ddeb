#pragma once

// What somebody may have meant who mistyped a name.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace smp {

/// Lower case without separators: what people mix up anyway.
std::string folded_name(std::string_view x);

/// Insertions, deletions, replacements and swaps of neighbours between `x` and
/// `y` (optimal string alignment distance).
size_t typing_distance(std::string_view x, std::string_view y);

/// The number of typing errors that a word of this length may have.
size_t typing_tolerance(std::string_view x);

/// @returns the name that `x` may have been meant to be; empty if none is near
std::string_view nearest_name(std::string_view x,
                              std::span<const std::string_view> names);

} // namespace smp
