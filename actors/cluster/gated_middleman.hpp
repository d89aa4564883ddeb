#pragma once

#include "transport/network/tls_relay.hpp"
#include "transport/run_secret.hpp"

#include <caf/io/middleman_actor.hpp>
#include <caf/io/middleman_actor_impl.hpp>

#include <optional>
#include <string>

namespace smp {

/// Opens and connects ports for CAF as its own middleman actor does, but with a
/// gate in front (R44): BASP has no authentication, believes each length that
/// it reads, and runs any handler of any actor for whoever connects.
///
/// CAF lets the actor in front of its BASP broker make the connections (its
/// OpenSSL module is another one), so what passed the gate becomes an ordinary
/// connection of the broker and costs nothing more. Over a network that is the
/// inner end of a TLS connection.
class gated_middleman_impl : public caf::io::middleman_actor_impl {
public:
  using super = caf::io::middleman_actor_impl;

  struct options {
    run_secret secret;
    std::optional<tls_line> line;
    /// See `gate::options`.
    std::string note = {};
  };

  gated_middleman_impl(caf::actor_config& cfg, caf::actor broker, options x);

protected:
  /// Blocks its own thread while the other side answers.
  caf::expected<caf::io::scribe_ptr> connect(const std::string& host,
                                             uint16_t port) override;

  caf::expected<caf::io::doorman_ptr> open(uint16_t port, const char* address,
                                           bool reuse) override;

private:
  options options_;
};

/// @pre the middleman is loaded. Ends by an exit message.
caf::io::middleman_actor gated_middleman(caf::actor_system& system,
                                         gated_middleman_impl::options x);

} // namespace smp
