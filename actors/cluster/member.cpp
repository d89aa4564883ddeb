#include "actors/cluster/member.hpp"

#include "actors/protocol/plain_text.hpp"

#include <caf/send.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace smp {

namespace {

constexpr std::chrono::milliseconds stop_look_interval{500};

} // namespace

void member_state::join() {
  auto& joined = config.joined;
  // The SUPERVISOR knows which ranks are missing, so wait longer for its reply.
  auto limit = config.join_limit + std::chrono::seconds(2);
  self->request(config.supervisor, limit, config.me, member_actor{self})
    .then(
      [this, joined](welcome& x) {
        if (x.error)
          return joined->fail(std::move(x.error));
        neighbours = neighbour_processes{x.members, config.me};
        joined->set_value(std::move(x));
        if (config.watch)
          look();
      },
      [joined, address = config.address](const caf::error& e) {
        joined->fail({error_code::rank_down,
                      no_rank,
                      {},
                      "the SUPERVISOR at " + address
                        + " did not answer: " + plain_text(e)});
      });
  if (config.stopped_here)
    look_for_stops();
}

void member_state::look_for_stops() {
  if (config.joined->done())
    return;
  auto found = config.stopped_here();
  std::set<rank_id> now{found.begin(), found.end()};
  auto tell = [this](rank_id x, bool is_stopped) {
    self->send(config.supervisor, stall_atom_v, x, is_stopped);
  };
  for (auto x : now)
    if (!stopped.contains(x))
      tell(x, true);
  for (auto x : stopped)
    if (!now.contains(x))
      tell(x, false);
  stopped = std::move(now);
  self->run_delayed(stop_look_interval, [this] { look_for_stops(); });
}

void member_state::on_rank_down(const failure& x) {
  if (leaving)
    return;
  losses.push_back(x);
  config.on_rank_down(x);
}

void member_state::on_supervisor_down() {
  auto err = failure{error_code::rank_down,
                     no_rank,
                     {},
                     "the SUPERVISOR at " + config.address
                       + " is lost: its process ended or the connection broke"};
  if (!config.joined->done())
    config.joined->fail(std::move(err));
  else
    on_rank_down(err);
}

void member_state::look() {
  auto now = self->clock().now();
  if (!asked) {
    asked = now;
    self->request(config.supervisor, caf::infinite, status_atom_v)
      .then(
        [this](const supervisor_status&) {
          asked.reset();
          told = false;
        },
        [](const caf::error&) {
          // The SUPERVISOR is lost; `on_supervisor_down` reports it.
        });
  } else {
    for (auto& x : neighbours.take_ended())
      on_rank_down(x);
    std::chrono::duration<double> silent = now - *asked;
    if (silent.count() >= config.me.stalls.timeout)
      on_silence(silent);
  }
  auto pause = std::chrono::milliseconds{
    static_cast<int64_t>(config.me.stalls.timeout * 1000 / 5)};
  self->run_delayed(
    std::clamp<std::chrono::milliseconds>(pause, std::chrono::milliseconds{20},
                                          std::chrono::milliseconds{500}),
    [this] { look(); });
}

void member_state::on_silence(std::chrono::duration<double> x) {
  if (leaving || std::exchange(told, true))
    return;
  auto text = fmt::format(
    "the SUPERVISOR at {} has not answered for {:.1f} s: "
    "its process, which is rank 0 or the launcher, is "
    "stopped or out of reach",
    config.address, x.count());
  if (config.says_silence)
    std::fprintf(stderr, "smp: %s\n", text.c_str());
  if (config.me.stalls.end)
    self->send(config.watch, stall_atom_v,
               failure{error_code::stalled, no_rank, {}, text});
  else
    self->send(config.watch, stall_atom_v, text);
}

member_actor::behavior_type member_ear(member_state::pointer self,
                                       member_config config) {
  auto& st = self->state;
  st.config = std::move(config);
  self->set_down_handler(
    [self](const caf::down_msg&) { self->state.on_supervisor_down(); });
  self->set_error_handler([](const caf::error&) {});
  self->monitor(st.config.supervisor);
  st.join();
  return {
    [self](down_atom, const failure& x) { self->state.on_rank_down(x); },
    [self](goodbye_atom) { self->state.leaving = true; },
    [self](status_atom) {
      auto& st = self->state;
      return member_status{st.config.me.rank, st.losses};
    },
  };
}

} // namespace smp
