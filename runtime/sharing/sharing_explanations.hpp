#pragma once

#include "runtime/sharing/sharing.hpp"

#include <map>
#include <string>

namespace smp {

/// Adds modules requested for sharing that have parameters but no distributed
/// implementation, if nothing below is shared or cut by its own code.
/// @param marked the marks of user code, by object
/// @param x the request, not of one rank
/// @param to the decision
void explain_unknown(const walked_model& model,
                     const std::map<const void*, sharing_mark>& marked,
                     const sharing_request& x, sharing_decision& to);

/// Ranks that share nothing compute correct results, but hold a copy of the
/// model each.
/// @returns the warning in that case; else empty
std::string warning_of_nothing_shared(const sharing_request& x,
                                      const sharing_decision& found);

} // namespace smp
