#include "actors/cluster/supervisor_link.hpp"

#include "actors/cluster/control_port.hpp"
#include "actors/protocol/actor_system.hpp"

#include <caf/send.hpp>
#include <caf/typed_event_based_actor.hpp>

#include <utility>

namespace smp {

namespace {

/// What the SUPERVISOR tells a launcher as well as the ranks.
member_actor::behavior_type supervisor_witness(
  member_actor::pointer self, const supervisor_actor& supervisor,
  std::function<void(const failure&)> on_end, std::function<void()> on_lost) {
  self->set_down_handler([self, on_lost](const caf::down_msg&) {
    if (on_lost)
      on_lost();
    self->quit();
  });
  self->monitor(supervisor);
  self->send(supervisor, member_actor{self});
  return {
    [on_end](down_atom, const failure& x) {
      if (on_end)
        on_end(x);
    },
    [](goodbye_atom) {},
    [](status_atom) { return member_status{}; },
  };
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
    witness = system.spawn(supervisor_witness, supervisor, std::move(x.on_end),
                           std::move(x.on_lost));
  }

  ~impl() {
    end_actor(system, witness);
    end_actor(system, ports, caf::exit_reason::kill);
  }

  caf::actor_system& system;
  caf::io::middleman_actor ports;
  supervisor_actor supervisor;
  member_actor witness;
};

supervisor_link::supervisor_link(actor_host& host, options x)
  : impl_(std::make_unique<impl>(host, std::move(x))) {
  // nop
}

supervisor_link::~supervisor_link() = default;

void supervisor_link::report_down(const failure& x) {
  caf::anon_send(impl_->supervisor, down_atom_v, x);
}

void supervisor_link::report_result(const failure& x) {
  caf::anon_send(impl_->supervisor, goodbye_atom_v, x);
}

void supervisor_link::report_stop(rank_id x, bool stopped) {
  caf::anon_send(impl_->supervisor, stall_atom_v, x, stopped);
}

} // namespace smp
