#pragma once

#include "transport/error.hpp"

namespace smp {

class rank_context;

/// @returns the rank whose code the calling thread runs
/// @throws `no_session()`
const rank_context& current_rank();

/// What is wrong where code of a rank is wanted and there is none.
error no_session();

} // namespace smp
