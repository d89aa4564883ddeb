#pragma once

#include "partition/trace.hpp"
#include "runtime/session/sharing.hpp"

namespace smp {

/// Adds what sharing saves and costs, for people: how many numbers a rank holds
/// of each module that is shared, and how many bytes it sends for it in a
/// microbatch.
/// @param x what was wanted
/// @param trace null: nothing is known of calls
void describe_parts(const walked_model& model, const sharing_request& x,
                    const trace_result* trace, sharing_decision& decision);

} // namespace smp
