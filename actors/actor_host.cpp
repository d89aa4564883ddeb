#include "actors/actor_host.hpp"

#include "actors/actors.hpp"
#include "actors/schedule_actor.hpp"

#include <caf/init_global_meta_objects.hpp>
#include <caf/io/middleman.hpp>

#include <chrono>

namespace smp {

void init_message_types() {
  static const bool done = [] {
    // Own types first: CAF's own come in whatever order.
    caf::init_global_meta_objects<caf::id_block::smp>();
    caf::init_global_meta_objects<caf::id_block::smp_actors>();
    caf::init_global_meta_objects<caf::id_block::smp_schedule>();
    caf::io::middleman::init_global_meta_objects();
    caf::core::init_global_meta_objects();
    return true;
  }();
  static_cast<void>(done);
}

// Never parses: a stray caf-application.conf must not change how smp runs.
host_config::host_config() {
  using namespace std::chrono_literals;
  init_message_types();
  // Idle workers of the default policy sleep between polls, which costs a
  // remote call 200 us; with more than one thread each send wakes another.
  set("caf.scheduler.policy", "sharing");
  set("caf.scheduler.max-threads", 1);
  load<caf::io::middleman>();
  // Messages are read by the thread that received them.
  set("caf.middleman.workers", 0);
  // A rank that hangs is found in 11 s; neither may be 0 (CAF then waits for
  // ever, or drops healthy peers).
  set("caf.middleman.heartbeat-interval", caf::timespan{1s});
  set("caf.middleman.connection-timeout", caf::timespan{10s});
}

actor_host::actor_host() : impl_(std::make_unique<impl>()) {
  // nop
}

actor_host::~actor_host() = default;

} // namespace smp
