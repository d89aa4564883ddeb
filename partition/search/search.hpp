#pragma once

// Search for better assignments than a rule finds.

#include "partition/search/problem.hpp"

#include <limits>

namespace smp {

/// Smaller differences of loads result from adding shares in another order.
inline constexpr double load_noise = 1e-11;

/// The value of an assignment that is not permitted.
inline constexpr double infinite = std::numeric_limits<double>::infinity();

/// Objective of a search: the predicted time, among the assignments that keep
/// the largest load within a limit.
struct search_goal {
  communication crossing;
  double max_load = infinite;
};

/// Moves nodes and parts of subtrees, and swaps nodes in small trees, while
/// that improves the goal: the result is never worse than `start`.
/// @param effort bound on visited nodes and calls, which bounds the time
///        without making the result depend on a clock.
assignment improve(const partition_problem& p, const search_goal& goal,
                   assignment start, size_t effort);

/// Tries all assignments of a small tree, except those that can no longer be
/// better than `start`.
/// @returns the best one, or the best one found in `effort` trials.
assignment exhaust(const partition_problem& p, const search_goal& goal,
                   assignment start, size_t effort);

} // namespace smp
