#include "actors/protocol/actor_system.hpp"

#include "actors/protocol/actor_scheduler.hpp"
#include "actors/protocol/actors.hpp"
#include "actors/protocol/server_status.hpp"
#include "transport/refuse_waits.hpp"

#include <caf/init_global_meta_objects.hpp>
#include <caf/io/middleman.hpp>
#include <caf/thread_hook.hpp>

namespace smp {

void init_message_types() {
  static const bool done = [] {
    // Our own types first; those of CAF may follow in any order.
    caf::init_global_meta_objects<caf::id_block::smp>();
    caf::init_global_meta_objects<caf::id_block::smp_actors>();
    caf::init_global_meta_objects<caf::id_block::smp_inspection>();
    caf::init_global_meta_objects<caf::id_block::smp_comm>();
    caf::init_global_meta_objects<caf::id_block::smp_schedule>();
    caf::io::middleman::init_global_meta_objects();
    caf::core::init_global_meta_objects();
    return true;
  }();
  static_cast<void>(done);
}

namespace {

/// A wait on a thread of the actors would delay all of them.
class waits_refused final : public caf::thread_hook {
public:
  void init(caf::actor_system&) override {
    // nop
  }

  void thread_started() override {
    refuse_waits("a thread of the actors");
  }

  void thread_terminates() override {
    // nop
  }
};

} // namespace

// Never parses: a stray caf-application.conf must not change how smp runs.
host_config::host_config() {
  init_message_types();
  // Idle workers of the default policy sleep between polls, which costs a
  // remote call 200 us; with more than one thread each send wakes another.
  load<actor_scheduler>();
  set("caf.scheduler.max-threads", 1);
  load<caf::io::middleman>();
  // The thread that receives a message also decodes it.
  set("caf.middleman.workers", 0);
  // Disables CAF's own timeout: a stopped process is up to the STALL MONITOR.
  // When a process ends, its kernel closes the connection; when a machine is
  // gone, the kernel here notices (`bound_silence`).
  set("caf.middleman.heartbeat-interval", caf::timespan{0});
  add_thread_hook<waits_refused>();
}

actor_host::actor_host() : impl_(std::make_unique<impl>()) {
  // nop
}

actor_host::~actor_host() = default;

} // namespace smp
