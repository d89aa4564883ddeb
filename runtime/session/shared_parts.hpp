#pragma once

#include "partition/trace.hpp"
#include "runtime/session/sharing.hpp"

#include <map>
#include <string>

namespace smp {

/// Bytes that a rank sends in a microbatch, forward and backward, for each
/// module that it shares; without those of which nobody knows them.
using shared_traffic = std::map<module_id, double>;

/// @param x what was wanted
shared_traffic find_traffic(const walked_model& model, const sharing_request& x,
                            const trace_result& trace,
                            const sharing_decision& decision);

/// A trace shows what one rank does alone with its samples. Of what ranks share
/// each does a part for the samples of all, which comes to as much; so this is
/// for ranks with the same samples, where it is a part.
/// @param x what was wanted
/// @param timed times are those of modules
void weigh_parts(const walked_model& model, const sharing_decision& decision,
                 const sharing_request& x, bool timed, model_info& info);

/// Adds the time of what ranks send, which no trace shows, to that of modules.
/// @returns what to say of it behind where costs come from; may be empty
std::string weigh_traffic(const shared_traffic& sent, model_info& info);

/// Adds what sharing saves and costs, for people: how many numbers a rank holds
/// of each module that is shared, and how many bytes it sends for it in a
/// microbatch.
/// @param x what was wanted
void describe_parts(const walked_model& model, const sharing_request& x,
                    const shared_traffic& sent, sharing_decision& decision);

} // namespace smp
