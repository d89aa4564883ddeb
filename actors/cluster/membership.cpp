#include "actors/cluster/membership.hpp"

#include "actors/cluster/control_port.hpp"
#include "actors/cluster/member.hpp"
#include "actors/cluster/supervisor.hpp"
#include "actors/inspection/inspection_service.hpp"
#include "actors/protocol/actor_system.hpp"
#include "actors/protocol/plain_text.hpp"
#include "actors/stalls/stall_monitor.hpp"
#include "transport/network/addresses.hpp"

#include <caf/io/middleman.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace smp {

using namespace std::chrono_literals;

// -- supervisor_host ----------------------------------------------------------

struct supervisor_host::impl {
  impl(actor_host& host, options x) : system(host.get().system) {
    if (!x.line && !is_loopback(x.address))
      throw error{error_code::config,
                  "the control plane cannot listen on " + x.address
                    + " without keys (smp-train keys DIR): only on loopback "
                      "addresses"};
    open_line(host, x.line);
    auto address = x.address;
    auto wanted = x.port;
    if (!x.on_rank_down)
      x.on_rank_down = [](const failure&) {};
    x.on_stall = [this, f = std::move(x.on_stall)](const stall_report& y) {
      // Elsewhere all ranks may be silent: their launchers have to hear it.
      if (y.ends)
        caf::anon_send(actor, stall_atom_v,
                       failure{error_code::stalled, no_rank, {}, y.text});
      if (f)
        f(y);
    };
    inspector_config inspected;
    inspected.world_size = x.world_size;
    ports = gated_middleman(system, {x.secret, x.line, x.note, x.on_refused});
    actor = system.spawn(supervisor, std::move(x));
    inspected.supervisor = actor;
    inspection.emplace(system, std::move(inspected));
    caf::anon_send(actor, inspection->actor());
    caf::error problem;
    caf::scoped_actor self{system};
    self
      ->request(ports, caf::infinite, caf::publish_atom_v, wanted,
                caf::actor_cast<caf::strong_actor_ptr>(actor),
                system.message_types<supervisor_actor>(), address, false)
      .receive([this](uint16_t bound) { port = bound; },
               [&problem](caf::error& e) { problem = std::move(e); });
    if (!problem)
      return;
    inspection.reset();
    end_actor(system, actor);
    end_actor(system, ports, caf::exit_reason::kill);
    throw error{error_code::transport,
                fmt::format("the SUPERVISOR cannot listen on {}: {}",
                            endpoint(address, wanted), plain_text(problem))};
  }

  ~impl() {
    inspection.reset();
    end_actor(system, actor);
    caf::scoped_actor self{system};
    self
      ->request(ports, caf::infinite, caf::unpublish_atom_v, actor.address(),
                port)
      .receive([] {}, [](const caf::error&) {});
    end_actor(system, ports, caf::exit_reason::kill);
  }

  caf::actor_system& system;
  caf::io::middleman_actor ports;
  supervisor_actor actor;
  std::optional<inspection_service> inspection;
  uint16_t port = 0;
};

supervisor_host::supervisor_host(actor_host& host, options x)
  : impl_(std::make_unique<impl>(host, std::move(x))) {
  // nop
}

supervisor_host::~supervisor_host() = default;

uint16_t supervisor_host::port() const {
  return impl_->port;
}

inspection_entry supervisor_host::open_inspection() {
  return impl_->inspection->open();
}

void supervisor_host::report_down(const failure& x) {
  caf::anon_send(impl_->actor, down_atom_v, x);
}

void supervisor_host::report_result(const failure& x) {
  caf::anon_send(impl_->actor, goodbye_atom_v, x);
}

std::vector<uint64_t> supervisor_host::tell_course(bool again) {
  std::vector<uint64_t> result;
  caf::scoped_actor self{impl_->system};
  self->request(impl_->actor, 6s, again_atom_v, again)
    .receive([&](std::vector<uint64_t>& heard) { result = std::move(heard); },
             [](const caf::error&) {});
  std::sort(result.begin(), result.end());
  return result;
}

void supervisor_host::report_stop(rank_id x, bool stopped) {
  caf::anon_send(impl_->actor, stall_atom_v, x, stopped);
}

// -- membership ---------------------------------------------------------------

struct membership::impl {
  impl(actor_host& host, options x)
    : system(host.get().system), config(std::move(x)) {
    if (!config.on_rank_down)
      config.on_rank_down = [](const failure&) {};
    open_line(host, config.line);
  }

  ~impl() {
    if (ear)
      end_actor(system, ear);
    if (watch)
      end_actor(system, watch);
    if (ports)
      end_actor(system, ports, caf::exit_reason::kill);
  }

  std::vector<member> join() {
    auto joined = std::make_shared<awaited<welcome>>();
    ports = gated_middleman(system, {config.secret, config.line});
    supervisor = find_supervisor(system, ports, config.address, config.port,
                                 config.join_limit,
                                 fmt::format("rank {}", config.me.rank.value));
    if (config.watch.look)
      watch = system.spawn<caf::detached>(rank_watch, config.watch);
    member_config mine;
    mine.me = config.me;
    mine.supervisor = supervisor;
    mine.address = endpoint(config.address, config.port);
    mine.join_limit = config.join_limit;
    mine.on_rank_down = config.on_rank_down;
    mine.watch = watch;
    mine.says_silence = config.says_silence;
    mine.stopped_here = config.stopped_here;
    mine.joined = joined;
    ear = system.spawn(member_ear, std::move(mine));
    auto members = awaited<welcome>::get(joined, {"all ranks to join", {}})
                     .members;
    if (watch)
      caf::anon_send(supervisor, config.me.rank, watch);
    return members;
  }

  void leave() {
    if (!ear)
      return;
    caf::scoped_actor self{system};
    self->send(ear, goodbye_atom_v);
    // No answer means that the SUPERVISOR is gone, which is not a loss now.
    self->request(supervisor, 2s, goodbye_atom_v, config.me.rank)
      .receive([] {}, [](const caf::error&) {});
    end_actor(system, std::exchange(ear, nullptr));
  }

  caf::actor_system& system;
  options config;
  caf::io::middleman_actor ports;
  supervisor_actor supervisor;
  member_actor ear;
  rank_watch_actor watch;
};

membership::membership(actor_host& host, options x)
  : impl_(std::make_unique<impl>(host, std::move(x))) {
  // nop
}

membership::~membership() = default;

std::vector<member> membership::join() {
  return impl_->join();
}

void membership::leave() {
  impl_->leave();
}

} // namespace smp
