#pragma once

// Shared by hosts, members and links of the control plane.

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

/// Keeps a TLS connection until the host ends, beyond the actors that use it,
/// as their last messages may still be unsent.
void open_line(actor_host& host, std::optional<tls_line>& x);

/// Retries until something listens: the SUPERVISOR may start after the ranks.
/// @param who the name of the caller, for the error
/// @throws error (rank_down) after `limit`
supervisor_actor find_supervisor(caf::actor_system& system,
                                 const caf::io::middleman_actor& ports,
                                 const std::string& address, uint16_t port,
                                 std::chrono::milliseconds limit,
                                 const std::string& who);

/// Ends an actor and waits for its end, so that no callback runs afterwards.
/// (CAF's middleman actors react to the reason `kill` only.)
template <class Handle>
void end_actor(caf::actor_system& system, const Handle& hdl,
               caf::exit_reason reason = caf::exit_reason::user_shutdown) {
  caf::scoped_actor self{system};
  self->monitor(hdl);
  self->send_exit(hdl, reason);
  self->receive([](const caf::down_msg&) {});
}

} // namespace smp
