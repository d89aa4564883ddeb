#pragma once

#include "transport/files/run_secret.hpp"
#include "transport/network/tls_relay.hpp"

#include <caf/io/middleman_actor.hpp>
#include <caf/io/middleman_actor_impl.hpp>

#include <functional>
#include <optional>
#include <string>

namespace smp {

/// Opens and connects ports for CAF as its own middleman actor does, but behind
/// a gate (R44): BASP has no authentication, trusts every length that it reads,
/// and lets any peer call any handler of any actor.
///
/// CAF lets the actor in front of its BASP broker make the connections (its
/// OpenSSL module is another such actor). So a connection that passed the gate
/// becomes an ordinary connection of the broker, at no further cost. Over a
/// network it is the inner end of a TLS connection.
class gated_middleman_impl : public caf::io::middleman_actor_impl {
public:
  using super = caf::io::middleman_actor_impl;

  struct options {
    run_secret secret;
    std::optional<tls_line> line;
    /// See `gate::options`.
    std::string note = {};
    std::function<void(const std::string&)> on_refused = {};
  };

  gated_middleman_impl(caf::actor_config& cfg, caf::actor broker, options x);

protected:
  /// Blocks its own thread until the other side answers.
  caf::expected<caf::io::scribe_ptr> connect(const std::string& host,
                                             uint16_t port) override;

  caf::expected<caf::io::doorman_ptr> open(uint16_t port, const char* address,
                                           bool reuse) override;

private:
  options options_;
};

/// @pre the middleman is loaded. The actor ends on an exit message.
caf::io::middleman_actor gated_middleman(caf::actor_system& system,
                                         gated_middleman_impl::options x);

} // namespace smp
