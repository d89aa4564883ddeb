#pragma once

// What hosts, members and links of the control plane have in common.

#include "actors/cluster/gated_middleman.hpp"
#include "actors/protocol/actor_host.hpp"
#include "actors/protocol/actors.hpp"

#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace smp {

/// TLS connections outlive the actors behind them: what those said last is
/// still to be sent.
void open_line(actor_host& host, std::optional<tls_line>& x);

/// Tries until somebody listens: the SUPERVISOR may start after the ranks.
/// @param who wants it, for the error
/// @throws error (rank_down) after `limit`
supervisor_actor find_supervisor(caf::actor_system& system,
                                 const caf::io::middleman_actor& ports,
                                 const std::string& address, uint16_t port,
                                 std::chrono::milliseconds limit,
                                 const std::string& who);

/// Ends an actor and waits for it, so that no callback comes afterwards. (CAF's
/// middleman actors hear of no other reason than `kill`.)
template <class Handle>
void end_actor(caf::actor_system& system, const Handle& hdl,
               caf::exit_reason reason = caf::exit_reason::user_shutdown) {
  caf::scoped_actor self{system};
  self->monitor(hdl);
  self->send_exit(hdl, reason);
  self->receive([](const caf::down_msg&) {});
}

} // namespace smp
