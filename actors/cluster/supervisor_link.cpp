#include "actors/cluster/supervisor_link.hpp"

#include "actors/cluster/control_port.hpp"
#include "actors/protocol/actor_system.hpp"

#include <caf/send.hpp>
#include <caf/typed_event_based_actor.hpp>

#include <atomic>
#include <utility>

namespace smp {

namespace {

using shared_course = std::shared_ptr<std::atomic<run_course>>;

/// What the SUPERVISOR tells a launcher.
launcher_link_actor::behavior_type
launcher_link(launcher_link_actor::pointer self,
              const supervisor_actor& supervisor,
              std::function<void(const failure&)> on_end,
              std::function<void()> on_lost, const shared_course& course) {
  self->set_down_handler([self, on_lost, course](const caf::down_msg&) {
    auto before = run_course::unknown;
    course->compare_exchange_strong(before, run_course::lost);
    if (on_lost)
      on_lost();
    self->quit();
  });
  self->monitor(supervisor);
  return {
    [on_end](stall_atom, const failure& x) {
      if (on_end)
        on_end(x);
    },
    [course](again_atom, bool again) {
      *course = again ? run_course::again : run_course::over;
    },
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
    link = system.spawn(launcher_link, supervisor, std::move(x.on_end),
                        std::move(x.on_lost), course);
    // Without an answer the SUPERVISOR is gone, which the link hears as well.
    caf::scoped_actor self{system};
    self->request(supervisor, x.limit, x.machine, link)
      .receive([] {}, [](const caf::error&) {});
  }

  ~impl() {
    end_actor(system, link);
    end_actor(system, ports, caf::exit_reason::kill);
  }

  caf::actor_system& system;
  caf::io::middleman_actor ports;
  supervisor_actor supervisor;
  launcher_link_actor link;
  shared_course course = std::make_shared<std::atomic<run_course>>(
    run_course::unknown);
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

run_course supervisor_link::course() const {
  return *impl_->course;
}

} // namespace smp
