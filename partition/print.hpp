#pragma once

#include "partition/partitioner.hpp"

namespace smp {

struct print_options {
  bool colour = false;   // ANSI escapes, one colour per device
  size_t max_lines = 24; // of the tree; small and deep parts are folded
};

/// Shows a decision to people: the tree with parameters, share of the cost and
/// device, the load of each device, and what may surprise. What is on one
/// device is one line, and so are equal neighbours ("h.0-3").
/// @returns some lines, each with its end of line.
std::string print_partition(const model_info& model, const partition_plan& plan,
                            const print_options& options = {});

/// @returns `x` without ANSI escapes.
std::string without_colours(std::string x);

} // namespace smp
