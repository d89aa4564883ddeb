#pragma once

// What the threads of ranks are doing, as text and JSON.

#include "apps/report/run_json.hpp"

#include <cstddef>
#include <span>
#include <string>

namespace smp::app {

/// @param x the name of a function as C++ writes it
/// @returns it without what is in <> and (), and in the middle without what
/// does not fit into `width`, at least 8
std::string short_function(const std::string& x, size_t width);

/// @returns all threads of each rank, in 80 columns where paths let it
std::string stack_text(std::span<const process_stacks> ranks);

/// The same, whole.
json stack_json(std::span<const process_stacks> ranks);

} // namespace smp::app
