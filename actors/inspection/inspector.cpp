#include "actors/inspection/inspector.hpp"

#include "transport/process_state.hpp"

#include <caf/send.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include <unistd.h>

namespace smp {

// -- asking -------------------------------------------------------------------

void inspector_state::add(rank_id x, const rank_watch_actor& hdl) {
  auto& y = ranks[x.value];
  y.actor = hdl;
  y.heard = clock::now();
  y.entry.rank = x;
  // Asked early: if the rank is stopped later, its process must be known.
  ask_rank(x.value);
}

void inspector_state::ask_rank(uint64_t x) {
  if (!asked.insert(x).second)
    return;
  self->request(ranks[x].actor, caf::infinite, inspect_atom_v)
    .then(
      [this, x](rank_status& y) {
        auto& to = ranks[x];
        to.heard = clock::now();
        to.entry.known = true;
        to.entry.status = std::move(y);
        heard(x);
      },
      [this, x](const caf::error&) {
        ranks[x].failed = true;
        heard(x);
      });
}

void inspector_state::ask_supervisor() {
  if (!config.supervisor || !asked.insert(the_supervisor).second)
    return;
  self->request(config.supervisor, caf::infinite, status_atom_v)
    .then(
      [this](supervisor_status& x) {
        members = std::move(x);
        heard(the_supervisor);
      },
      [](const caf::error&) {
        // The SUPERVISOR is gone, and this actor ends soon.
      });
}

void inspector_state::ask_monitor() {
  if (!monitor || !asked.insert(the_monitor).second)
    return;
  self->request(monitor, caf::infinite, status_atom_v)
    .then(
      [this](stall_status& x) {
        stalls = std::move(x);
        heard(the_monitor);
      },
      [this](const caf::error&) {
        // The monitor ends when ranks leave; its last status stays valid.
        monitor = nullptr;
        heard(the_monitor);
      });
}

void inspector_state::heard(uint64_t who) {
  asked.erase(who);
  auto all = collections;
  for (auto& x : all) {
    x->missing.erase(who);
    if (x->missing.empty())
      finish(x);
  }
}

// -- answering ----------------------------------------------------------------

caf::result<run_status> inspector_state::collect() {
  for (auto& [rank, x] : ranks)
    if (!x.failed)
      ask_rank(rank);
  ask_supervisor();
  ask_monitor();
  auto x = std::make_shared<collection>();
  x->promise = self->make_response_promise<run_status>();
  x->missing = asked;
  auto result = x->promise;
  if (x->missing.empty()) {
    result.deliver(this->result({}));
    return result;
  }
  collections.insert(x);
  self->run_delayed(config.answer_limit, [this, x] { finish(x); });
  return result;
}

caf::result<std::vector<std::string>>
inspector_state::collect(const flight_query& query) {
  auto x = std::make_shared<flight_collection>();
  x->promise = self->make_response_promise<std::vector<std::string>>();
  auto result = x->promise;
  auto one_less = [x] {
    if (--x->missing == 0)
      x->promise.deliver(std::move(x->answers));
  };
  auto limit = query.what == flight_query::kind::stacks ? config.stacks_limit
                                                        : config.answer_limit;
  for (auto& [rank, y] : ranks)
    x->missing += y.failed ? 0 : 1;
  if (x->missing == 0)
    result.deliver(std::vector<std::string>{});
  for (auto& [rank, y] : ranks)
    if (!y.failed)
      self->request(y.actor, limit, query)
        .then(
          [x, one_less](std::string& answer) {
            if (!answer.empty())
              x->answers.push_back(std::move(answer));
            one_less();
          },
          [one_less](const caf::error&) { one_less(); });
  return result;
}

void inspector_state::finish(const collection_ptr& x) {
  if (collections.erase(x) > 0)
    x->promise.deliver(result(x->missing));
}

/// The kernel knows this for processes on this machine; for those on others,
/// their launcher tells the SUPERVISOR.
bool inspector_state::is_stopped(const rank_entry& x) const {
  if (std::count(members.stopped.begin(), members.stopped.end(), x.rank) > 0)
    return true;
  auto state = x.known && x.status.host == host_name()
                 ? state_of_process(x.status.pid)
                 : std::nullopt;
  return state && state->stopped();
}

rank_entry inspector_state::entry_of(rank_id x, bool missing) {
  auto is_x = [x](auto& y) { return y.rank == x; };
  auto i = ranks.find(x.value);
  rank_entry result;
  if (i != ranks.end())
    result = i->second.entry;
  result.rank = x;
  auto& losses = members.losses;
  if (auto loss = std::find_if(losses.begin(), losses.end(), is_x);
      loss != losses.end()) {
    result.health = rank_health::lost;
    result.why = loss->text;
  } else if (std::count(members.gone.begin(), members.gone.end(), x) > 0) {
    result.health = rank_health::left;
  } else if (i == ranks.end()) {
    auto stopped = is_stopped(result);
    result.health = stopped ? rank_health::stopped : rank_health::joining;
    if (stopped)
      result.why = "its process is stopped, and it has not joined";
  } else if (i->second.failed) {
    result.health = result.status.view.left ? rank_health::left
                                            : rank_health::lost;
    result.why = "its process ended or its connection broke";
  } else if (missing) {
    auto stopped = is_stopped(result);
    result.health = stopped ? rank_health::stopped : rank_health::silent;
    result.why = stopped ? "its process is stopped" : "it does not answer";
  } else if (!result.status.view.complete && !result.status.view.left) {
    result.health = rank_health::blocked;
    result.why = "the thread of its actors is blocked: they do not answer";
  } else {
    result.health = rank_health::well;
  }
  if (i != ranks.end()) {
    std::chrono::duration<double> since = clock::now() - i->second.heard;
    result.seconds = since.count();
  }
  return result;
}

std::vector<actor_status>
inspector_state::own_actors(const std::set<uint64_t>& missing) const {
  std::vector<actor_status> result;
  if (config.supervisor) {
    actor_status x;
    x.id = "supervisor";
    x.name = "SUPERVISOR";
    x.answers = missing.count(the_supervisor) == 0;
    x.items = {{"ranks", std::to_string(members.world_size)},
               {"present", std::to_string(members.present.size())},
               {"gone", std::to_string(members.gone.size())},
               {"lost", std::to_string(members.losses.size())}};
    result.push_back(std::move(x));
  }
  if (monitor) {
    actor_status x;
    x.id = "stalls";
    x.name = "STALL MONITOR";
    x.parent = config.supervisor ? "supervisor" : "";
    x.answers = missing.count(the_monitor) == 0;
    x.state = stalls.standing ? "STALL" : "";
    x.items = {{"reports", std::to_string(stalls.reports)}};
    if (!stalls.text.empty())
      x.items.push_back({"last report", stalls.text});
    result.push_back(std::move(x));
  }
  actor_status me;
  me.id = "inspector";
  me.name = "INSPECTOR";
  me.parent = config.supervisor ? "supervisor" : "";
  me.items = {{"ranks asked", std::to_string(ranks.size())}};
  result.push_back(std::move(me));
  return result;
}

run_status inspector_state::result(const std::set<uint64_t>& missing) {
  run_status result;
  result.pid = ::getpid();
  result.host = host_name();
  for (uint64_t i = 0; i < config.world_size; ++i)
    result.ranks.push_back(entry_of(rank_id{i}, missing.count(i) > 0));
  result.stalls = stalls;
  result.actors = own_actors(missing);
  return result;
}

// -- behavior -----------------------------------------------------------------

inspector_actor::behavior_type inspector(inspector_state::pointer self,
                                         inspector_config config) {
  self->state.config = std::move(config);
  self->set_error_handler([](const caf::error&) {});
  return {
    [self](rank_id x, const rank_watch_actor& hdl) { self->state.add(x, hdl); },
    [self](const stall_monitor_actor& x) { self->state.monitor = x; },
    [self](inspect_atom) { return self->state.collect(); },
    [self](const flight_query& x) { return self->state.collect(x); },
  };
}

} // namespace smp
