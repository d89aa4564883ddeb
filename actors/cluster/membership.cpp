#include "actors/cluster/membership.hpp"

#include "actors/cluster/gated_middleman.hpp"
#include "actors/cluster/member.hpp"
#include "actors/cluster/supervisor.hpp"
#include "actors/protocol/actor_system.hpp"
#include "actors/stalls/stall_monitor.hpp"

#include <caf/io/middleman.hpp>
#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>

#include <fmt/format.h>

#include <set>
#include <utility>

namespace smp {

namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

std::string endpoint(const std::string& address, uint16_t port) {
  return fmt::format("{}:{}", address, port);
}

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1"
         || address.starts_with("127.");
}

/// Ends an actor and waits for it, so that no callback comes afterwards. (CAF's
/// middleman actors hear of no other reason than `kill`.)
template <class Handle>
void end_actor(caf::actor_system& system, const Handle& hdl,
               caf::exit_reason reason = caf::exit_reason::user_shutdown) {
  caf::scoped_actor self{system};
  self->monitor(hdl);
  self->send_exit(hdl, reason);
  self->receive([](const caf::down_msg&) {});
}

} // namespace

// -- supervisor_host ----------------------------------------------------------

struct supervisor_host::impl {
  impl(actor_host& host, options x) : system(host.get().system) {
    if (!is_loopback(x.address))
      throw error{error_code::config,
                  "the control plane cannot listen on " + x.address
                    + ": only loopback addresses until it has TLS"};
    auto address = x.address;
    auto wanted = x.port;
    if (!x.on_rank_down)
      x.on_rank_down = [](const failure&) {};
    ports = gated_middleman(system, x.secret);
    actor = system.spawn(supervisor, std::move(x));
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
    end_actor(system, actor);
    end_actor(system, ports, caf::exit_reason::kill);
    throw error{error_code::transport,
                fmt::format("the SUPERVISOR cannot listen on {}: {}",
                            endpoint(address, wanted), to_string(problem))};
  }

  ~impl() {
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

void supervisor_host::report_down(const failure& x) {
  caf::anon_send(impl_->actor, down_atom_v, x);
}

// -- membership ---------------------------------------------------------------

struct membership::impl {
  impl(actor_host& host, options x)
    : system(host.get().system), config(std::move(x)) {
    if (!config.on_rank_down)
      config.on_rank_down = [](const failure&) {};
  }

  ~impl() {
    if (ear)
      end_actor(system, ear);
    if (watch)
      end_actor(system, watch);
    if (ports)
      end_actor(system, ports, caf::exit_reason::kill);
  }

  /// Tries until somebody listens: the SUPERVISOR may start after the ranks.
  supervisor_actor connect() {
    caf::scoped_actor self{system};
    ports = gated_middleman(system, config.secret);
    auto end = std::chrono::steady_clock::now() + config.join_limit;
    supervisor_actor result;
    caf::error last;
    while (!result) {
      auto left = std::chrono::ceil<milliseconds>(
        end - std::chrono::steady_clock::now());
      if (left <= 0ms)
        throw error{
          error_code::rank_down,
          fmt::format("rank {} could not reach the SUPERVISOR at {}"
                      " within {} s: {}",
                      config.me.rank.value, address(),
                      static_cast<double>(config.join_limit.count()) / 1000,
                      to_string(last))};
      self
        ->request(ports, left, caf::connect_atom_v, config.address, config.port)
        .receive(
          [&](const caf::node_id&, const caf::strong_actor_ptr& hdl,
              const std::set<std::string>&) {
            result = caf::actor_cast<supervisor_actor>(hdl);
          },
          [&](caf::error& e) { last = std::move(e); });
      if (!result)
        self->receive(caf::after(20ms) >> [] {});
    }
    return result;
  }

  std::vector<member> join() {
    auto joined = std::make_shared<awaited<welcome>>();
    supervisor = connect();
    if (config.watch.look)
      watch = system.spawn<caf::detached>(rank_watch, config.watch);
    member_config mine;
    mine.me = config.me;
    mine.supervisor = supervisor;
    mine.address = address();
    mine.join_limit = config.join_limit;
    mine.on_rank_down = config.on_rank_down;
    mine.stalls = config.stalls;
    mine.watch = watch;
    mine.says_silence = config.says_silence;
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
    // Without an answer the SUPERVISOR is gone, which is no loss now.
    self->request(supervisor, 2s, goodbye_atom_v, config.me.rank)
      .receive([] {}, [](const caf::error&) {});
    end_actor(system, std::exchange(ear, nullptr));
  }

  std::string address() const {
    return endpoint(config.address, config.port);
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
