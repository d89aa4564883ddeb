#include "actors/stalls/stall_monitor.hpp"

#include "actors/inspection/inspection_service.hpp"
#include "actors/protocol/actor_system.hpp"

#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>

#include <algorithm>
#include <utility>

namespace smp {

namespace {

using namespace std::chrono_literals;

/// A rank that takes longer to answer counts as silent.
constexpr auto answer_limit = 600ms;

/// The time between two looks; shorter for short timeouts.
std::chrono::milliseconds interval(const stall_options& x) {
  auto part = std::chrono::milliseconds{
    static_cast<int64_t>(x.timeout * 1000 / 5)};
  return std::clamp<std::chrono::milliseconds>(part, 20ms, 200ms);
}

} // namespace

// -- one rank -----------------------------------------------------------------

rank_watch_actor::behavior_type
rank_watch(rank_watch_actor::stateful_pointer<rank_watch_state>,
           watched_rank rank) {
  return {
    [look = rank.look](look_atom) { return look(); },
    [report = rank.report](stall_atom, const std::string& x) { report(x); },
    [end = rank.end](stall_atom, const failure& x) { end(x); },
    [fail = rank.fail_step](stall_atom, const step_failed& x) {
      fail(x.step, x.error);
    },
    [view = rank.view](status_atom) { return view(); },
    [status = rank.status](inspect_atom) {
      return status ? status() : rank_status{};
    },
    [flight = rank.flight](const flight_query& x) {
      return flight ? flight(x) : std::string{};
    },
  };
}

// -- all ranks ----------------------------------------------------------------

void stall_monitor_state::look() {
  for (uint64_t i = 0; i < config.ranks.size(); ++i) {
    if (!asked.insert(i).second)
      continue;
    // A stopped rank answers when it continues, however late.
    self->request(config.ranks[i], caf::infinite, look_atom_v)
      .then(
        [this, i](uint64_t progress) {
          asked.erase(i);
          if (judge->heard(rank_id{i}, progress, self->clock().now()))
            status.standing = false;
        },
        [](const caf::error&) {
          // The rank is dead; the SUPERVISOR knows.
        });
  }
  look_closer();
}

void stall_monitor_state::look_closer() {
  if (viewing > 0 || !judge->wants_views(self->clock().now()))
    return;
  views.clear();
  viewing = config.ranks.size();
  for (auto& hdl : config.ranks)
    self->request(hdl, answer_limit, status_atom_v)
      .then(
        [this](rank_view& x) {
          views.push_back(std::move(x));
          viewed();
        },
        [this](const caf::error&) { viewed(); });
}

void stall_monitor_state::viewed() {
  if (--viewing > 0)
    return;
  if (auto x = judge->judge(std::move(views), self->clock().now()))
    report(*x);
}

void stall_monitor_state::report(const stall_report& x) {
  ++status.reports;
  status.text = x.text;
  status.standing = true;
  // Report first: ranks that end by it are not the cause.
  if (config.on_report)
    config.on_report(x);
  for (size_t i = 0; i < config.ranks.size(); ++i) {
    auto& hdl = config.ranks[i];
    if (x.step_fails)
      self->send(hdl, stall_atom_v, step_failed{x.steps[i], x.step_fails});
    else if (x.ends)
      self->send(hdl, stall_atom_v,
                 failure{error_code::stalled, no_rank, {}, x.text});
    else
      self->send(hdl, stall_atom_v, x.text);
  }
}

stall_monitor_actor::behavior_type
stall_monitor(stall_monitor_state::pointer self, stall_monitor_config config) {
  auto& st = self->state;
  st.config = std::move(config);
  st.judge.emplace(st.config.ranks.size(), st.config.options,
                   self->clock().now());
  self->set_error_handler([](const caf::error&) {});
  auto pause = interval(st.config.options);
  self->delayed_send(self, pause, look_atom_v);
  return {
    [self, pause](look_atom) {
      self->state.look();
      self->delayed_send(self, pause, look_atom_v);
    },
    [self](status_atom) {
      auto& st = self->state;
      st.status.quiet_seconds = st.judge->quiet(self->clock().now());
      return st.status;
    },
  };
}

// -- without CAF --------------------------------------------------------------

struct stall_search::impl {
  impl(actor_host& host, stall_options options,
       std::vector<watched_rank> watched)
    : system(host.get().system) {
    stall_monitor_config x;
    x.options = options;
    for (auto& y : watched)
      x.ranks.push_back(system.spawn<caf::detached>(rank_watch, std::move(y)));
    ranks = x.ranks;
    monitor = system.spawn(stall_monitor, std::move(x));
  }

  ~impl() {
    inspection.reset();
    end(monitor);
    for (auto& x : ranks)
      end(x);
  }

  inspection_entry open_inspection() {
    if (!inspection) {
      inspector_config x;
      x.world_size = ranks.size();
      inspection.emplace(system, std::move(x));
      caf::anon_send(inspection->actor(), monitor);
      for (uint64_t i = 0; i < ranks.size(); ++i)
        caf::anon_send(inspection->actor(), rank_id{i}, ranks[i]);
    }
    return inspection->open();
  }

  /// After this, the actor makes no more calls.
  template <class Handle>
  void end(const Handle& hdl) {
    caf::scoped_actor self{system};
    self->monitor(hdl);
    self->send_exit(hdl, caf::exit_reason::user_shutdown);
    self->receive([](const caf::down_msg&) {});
  }

  caf::actor_system& system;
  std::vector<rank_watch_actor> ranks;
  stall_monitor_actor monitor;
  std::optional<inspection_service> inspection;
};

stall_search::stall_search(actor_host& host, stall_options options,
                           std::vector<watched_rank> ranks)
  : impl_(std::make_unique<impl>(host, options, std::move(ranks))) {
  // nop
}

stall_search::~stall_search() = default;

inspection_entry stall_search::open_inspection() {
  return impl_->open_inspection();
}

} // namespace smp
