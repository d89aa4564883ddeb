#pragma once

#include "actors/protocol/actor_host.hpp"

#include <caf/actor_system.hpp>
#include <caf/actor_system_config.hpp>

#include <memory>
#include <vector>

namespace smp {

/// Registers all message types, once per process, before any actor system.
void init_message_types();

/// Settings of the actor system; its constructor gives the reasons.
struct host_config : caf::actor_system_config {
  host_config();
};

struct actor_host::impl {
  /// Lines below the system's connections; destroyed after all of these.
  std::vector<std::shared_ptr<void>> lines;
  host_config config;
  caf::actor_system system{config};
};

} // namespace smp
