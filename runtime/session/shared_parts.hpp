#pragma once

#include "partition/trace.hpp"
#include "runtime/session/sharing.hpp"

#include <string>
#include <vector>

namespace smp {

/// What sharing saves and costs, for people.
/// @param x what was wanted
/// @param trace null: nothing is known of calls
/// @returns how many numbers a rank holds of each module that is shared, and
/// how many bytes it sends for it in a microbatch, a line for those that are
/// alike
std::vector<std::string> describe_parts(const walked_model& model,
                                        const sharing_decision& decision,
                                        const sharing_request& x,
                                        const trace_result* trace);

} // namespace smp
