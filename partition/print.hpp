#pragma once

#include "partition/partitioner.hpp"

namespace smp {

struct print_options {
  bool colour = false;   // ANSI escapes, one colour per device
  size_t max_lines = 24; // of the tree; small and deep parts are folded
};

/// Formats a partition for people: the tree with parameters, share of the cost
/// and device of each part, the load of each device, and what may surprise.
/// Parts on one device are one line, and so are equal neighbours ("h.0-3").
/// @returns several lines, each with a newline at its end.
std::string print_partition(const model_info& model, const partition_plan& plan,
                            const print_options& options = {});

/// @returns `x` without ANSI escapes.
std::string without_colours(std::string x);

} // namespace smp
