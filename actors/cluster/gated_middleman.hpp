#pragma once

#include "transport/run_secret.hpp"

#include <caf/io/middleman_actor.hpp>
#include <caf/io/middleman_actor_impl.hpp>

#include <chrono>
#include <set>
#include <string>

namespace smp {

/// Opens and connects ports for CAF as its own middleman actor does, but with a
/// gate in front (R44): BASP has no authentication, believes each length that
/// it reads, and runs any handler of any actor for whoever connects.
///
/// CAF lets the actor in front of its BASP broker make the connections (its
/// OpenSSL module is another one), so what passed the gate becomes an ordinary
/// connection of the broker and costs nothing more.
class gated_middleman_impl : public caf::io::middleman_actor_impl {
public:
  using super = caf::io::middleman_actor_impl;

  gated_middleman_impl(caf::actor_config& cfg, caf::actor broker,
                       run_secret secret);

protected:
  /// Blocks its own thread while the other side answers.
  caf::expected<caf::io::scribe_ptr> connect(const std::string& host,
                                             uint16_t port) override;

  caf::expected<caf::io::doorman_ptr> open(uint16_t port, const char* address,
                                           bool reuse) override;

private:
  run_secret secret_;
};

/// @pre the middleman is loaded. Ends by an exit message.
caf::io::middleman_actor gated_middleman(caf::actor_system& system,
                                         const run_secret& secret);

} // namespace smp
