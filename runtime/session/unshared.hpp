#pragma once

#include "runtime/session/sharing.hpp"

#include <map>
#include <string>

namespace smp {

/// Adds what was to be shared and has parameters, but no distributed
/// implementation, where nothing below it is shared or cut by its own code.
/// @param marked what code says of modules, by object
/// @param x what was wanted, not of one rank
/// @param to what was decided
void explain_unknown(const walked_model& model,
                     const std::map<const void*, sharing_mark>& marked,
                     const sharing_request& x, sharing_decision& to);

/// Ranks that share nothing compute the right numbers, with the memory of as
/// many models.
/// @returns what to tell the user then; else nothing
std::string warning_of_nothing_shared(const sharing_request& x,
                                      const sharing_decision& found);

} // namespace smp
