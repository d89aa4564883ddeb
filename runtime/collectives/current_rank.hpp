#pragma once

#include "transport/error.hpp"

namespace smp {

class rank_context;

/// @returns the rank whose code the calling thread runs
/// @throws `no_session()`
const rank_context& current_rank();

/// The error for code that needs a rank and runs outside of any session.
error no_session();

} // namespace smp
