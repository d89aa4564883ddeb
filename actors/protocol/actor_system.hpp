#pragma once

#include "actors/protocol/actor_host.hpp"

#include <caf/actor_system.hpp>
#include <caf/actor_system_config.hpp>

#include <memory>
#include <vector>

namespace smp {

/// Registers all message types, once per process; before any actor system.
void init_message_types();

/// Settings of the actor system; the reasons stand beside them.
struct host_config : caf::actor_system_config {
  host_config();
};

struct actor_host::impl {
  /// What connections of the system go through: goes when all are closed.
  std::vector<std::shared_ptr<void>> lines;
  host_config config;
  caf::actor_system system{config};
};

} // namespace smp
