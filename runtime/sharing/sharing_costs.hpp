#pragma once

#include "partition/trace.hpp"
#include "runtime/sharing/sharing.hpp"

#include <map>
#include <string>

namespace smp {

/// Bytes that a rank sends per microbatch, forward and backward, for each
/// module that it shares; omits modules for which they are unknown.
using shared_traffic = std::map<module_id, double>;

/// @param x the sharing that was requested
shared_traffic find_traffic(const walked_model& model, const sharing_request& x,
                            const trace_result& trace,
                            const sharing_decision& decision);

/// A trace measures one rank alone with its own samples. Each rank computes a
/// part of a shared module for the samples of all ranks, which costs as much;
/// so use this where ranks have the same samples and each computes only a part.
/// @param x the sharing that was requested
/// @param timed times are those of modules
void weigh_parts(const walked_model& model, const sharing_decision& decision,
                 const sharing_request& x, bool timed, model_info& info);

/// Adds the communication time, which no trace shows, to that of modules.
/// @returns text to append to the source of the costs; may be empty
std::string weigh_traffic(const shared_traffic& sent, model_info& info);

/// Adds what sharing saves and costs, as text: how many numbers of each shared
/// module a rank holds, and how many bytes it sends for it per microbatch.
///
/// @param x the sharing that was requested
void describe_parts(const walked_model& model, const sharing_request& x,
                    const shared_traffic& sent, sharing_decision& decision);

} // namespace smp
