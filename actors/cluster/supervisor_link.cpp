#include "actors/cluster/supervisor_link.hpp"

#include "actors/cluster/control_port.hpp"
#include "actors/protocol/actor_system.hpp"

#include <caf/event_based_actor.hpp>

#include <utility>

namespace smp {

namespace {

caf::behavior supervisor_witness(caf::event_based_actor* self,
                                 const supervisor_actor& supervisor,
                                 std::function<void()> on_lost) {
  self->set_down_handler([self, on_lost](const caf::down_msg&) {
    if (on_lost)
      on_lost();
    self->quit();
  });
  self->monitor(supervisor);
  return {[](status_atom) { return true; }};
}

} // namespace

struct supervisor_link::impl {
  impl(actor_host& host, options x) : system(host.get().system) {
    open_line(host, x.line);
    ports = gated_middleman(system, {x.secret, x.line});
    try {
      supervisor = find_supervisor(system, ports, x.address, x.port, x.limit,
                                   "the launcher of this machine");
    } catch (...) {
      end_actor(system, ports, caf::exit_reason::kill);
      throw;
    }
    witness = system.spawn(supervisor_witness, supervisor,
                           std::move(x.on_lost));
  }

  ~impl() {
    end_actor(system, witness);
    end_actor(system, ports, caf::exit_reason::kill);
  }

  caf::actor_system& system;
  caf::io::middleman_actor ports;
  supervisor_actor supervisor;
  caf::actor witness;
};

supervisor_link::supervisor_link(actor_host& host, options x)
  : impl_(std::make_unique<impl>(host, std::move(x))) {
  // nop
}

supervisor_link::~supervisor_link() = default;

void supervisor_link::report_down(const failure& x) {
  caf::anon_send(impl_->supervisor, down_atom_v, x);
}

void supervisor_link::report_stop(rank_id x, bool stopped) {
  caf::anon_send(impl_->supervisor, stall_atom_v, x, stopped);
}

} // namespace smp
