#include "actors/inspection/inspection_service.hpp"

#include "actors/protocol/inspect_messages.hpp"
#include "transport/bytes.hpp"
#include "transport/flight/flight_event.hpp"

#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>

#include <algorithm>
#include <utility>

namespace smp {

inspection_service::inspection_service(caf::actor_system& system,
                                       inspector_config config)
  : system_(system),
    world_size_(config.world_size),
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
  x.collect = [this](inspection_question y) { return collect(y); };
  auto secret = x.secret;
  port_ = std::make_unique<inspection_port>(std::move(x));
  return entry_ = entry_of_this_process(port_->port(), secret);
}

inspection_port::bytes inspection_service::collect(inspection_question x) {
  using enum inspection_question;
  constexpr uint64_t all = ~uint64_t{0};
  constexpr uint64_t few = 2000;
  if (x == events || x == recent)
    return collect(flight_query::kind::last, x == recent ? few : all);
  if (x == begin_trace)
    return collect(flight_query::kind::begin_trace, all);
  if (x == finish_trace)
    return collect(flight_query::kind::finish_trace, all);
  if (x == stacks)
    return collect(flight_query::kind::stacks, all);
  byte_writer result;
  caf::scoped_actor self{system_};
  // The INSPECTOR has a deadline of its own.
  self->request(actor_, caf::infinite, inspect_atom_v)
    .receive([&](const run_status& x) { result.put(x); },
             [](const caf::error&) {});
  return result.take();
}

inspection_port::bytes inspection_service::collect(flight_query::kind what,
                                                   uint64_t limit) {
  // Names and headers need room, too.
  flight_query query{what,
                     std::min(limit, inspection_answer_limit / 2
                                       / sizeof(flight_event) / world_size_)};
  byte_writer result;
  caf::scoped_actor self{system_};
  self->request(actor_, caf::infinite, query)
    .receive(
      [&](const std::vector<std::string>& x) {
        size_t size = 0;
        std::vector<std::string> fitting;
        for (auto& y : x)
          if ((size += y.size()) < inspection_answer_limit - 4096)
            fitting.push_back(y);
        result.put(fitting);
      },
      [&](const caf::error&) { result.put(std::vector<std::string>{}); });
  return result.take();
}

} // namespace smp
