#include "actors/inspection/inspection_service.hpp"

#include "actors/protocol/inspect_messages.hpp"
#include "transport/bytes.hpp"

#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>

#include <utility>

namespace smp {

inspection_service::inspection_service(caf::actor_system& system,
                                       inspector_config config)
  : system_(system),
    actor_(system.spawn<caf::detached>(inspector, std::move(config))) {
  // nop
}

inspection_service::~inspection_service() {
  port_.reset();
  caf::scoped_actor self{system_};
  self->monitor(actor_);
  self->send_exit(actor_, caf::exit_reason::user_shutdown);
  self->receive([](const caf::down_msg&) {});
}

const inspection_entry& inspection_service::open() {
  if (port_)
    return entry_;
  inspection_port::options x;
  x.secret = run_secret::make();
  x.collect = [this] { return collect(); };
  auto secret = x.secret;
  port_ = std::make_unique<inspection_port>(std::move(x));
  return entry_ = entry_of_this_process(port_->port(), secret);
}

inspection_port::bytes inspection_service::collect() {
  byte_writer result;
  caf::scoped_actor self{system_};
  // The INSPECTOR has a deadline of its own.
  self->request(actor_, caf::infinite, inspect_atom_v)
    .receive([&](const run_status& x) { result.put(x); },
             [](const caf::error&) {});
  return result.take();
}

} // namespace smp
