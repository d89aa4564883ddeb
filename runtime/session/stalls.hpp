#pragma once

// Stalls as users of a session see them (docs/stalls.md).

#include "actors/stalls/stalls.hpp"

namespace smp {

class session;
struct session_config;

/// `monitor.stall_timeout` and `monitor.on_stall`.
stall_options stalls_of(const session_config& x);

/// Calls `f` for each stall report of the run, on another thread.
void on_stall(session& s, stall_listener f);

} // namespace smp
