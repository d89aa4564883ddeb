#include "actors/cluster/supervisor.hpp"

#include "actors/stalls/stall_monitor.hpp"

#include <caf/send.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace smp {

namespace {

caf::timespan seconds_of(double x) {
  return std::chrono::duration_cast<caf::timespan>(
    std::chrono::duration<double>(x));
}

/// A short timeout for stalled steps does not mean that programs start as fast:
/// wait at least as long as ranks of one machine may take to join.
constexpr std::chrono::seconds least_absence{30};

/// For a launcher of another machine to hear what follows.
constexpr std::chrono::seconds course_limit{5};

} // namespace

// -- joining ------------------------------------------------------------------

caf::result<welcome> supervisor_state::join(const member& x,
                                            const member_actor& hdl) {
  if (auto err = ranks->check_stranger(x))
    return welcome{{}, err};
  if (failed)
    return refuse(failed, hdl);
  if (auto err = ranks->admit(x)) {
    end_by(err);
    return refuse(err, hdl);
  }
  self->monitor(hdl);
  members.emplace(x.rank, hdl);
  if (!options.stalls && x.rank == rank_id{0} && x.stalls.timeout > 0)
    options.stalls = x.stalls;
  last_join = self->clock().now();
  auto promise = self->make_response_promise<welcome>();
  waiting.emplace(x.rank, promise);
  if (ranks->complete())
    for (auto& [rank, y] : std::exchange(waiting, {}))
      y.deliver(welcome{ranks->members(), {}});
  else
    refuse_absence();
  return promise;
}

welcome supervisor_state::refuse(const failure& x, const member_actor& hdl) {
  self->monitor(hdl);
  refused.insert(hdl.address());
  return {{}, x};
}

void supervisor_state::on_deadline() {
  if (closing)
    return self->quit(reason);
  if (ranks->complete() || failed)
    return;
  auto err = ranks->missing(options.join_limit);
  for (auto& [rank, since] : stopped)
    err.text += "; " + ranks->describe_stop(rank, self->clock().now() - since);
  end_by(err);
}

void supervisor_state::end_by(const failure& x) {
  // Before `fail`: ranks that hear of the loss and end are not the cause.
  options.on_rank_down(x);
  fail(x);
}

void supervisor_state::look_for_joins() {
  auto wait = std::max<std::chrono::duration<double>>(
    std::chrono::duration<double>{stalls().timeout}, least_absence);
  // The join deadline comes first, or this is the only rank.
  if (ranks->complete() || failed || closing || wait >= options.join_limit
      || ranks->world_size() == 1)
    return;
  std::chrono::duration<double> quiet = self->clock().now() - last_join;
  if (quiet >= wait) {
    auto absent = ranks->absent();
    std::erase_if(absent, [this](auto x) { return stopped.contains(x); });
    if (!absent.empty()) // else `judge_stop` reports it
      return report_absent(absent);
    quiet = {};
  }
  // One tick more, so that the wait is surely over.
  self->run_delayed(seconds_of((wait - quiet).count()) + caf::timespan{1},
                    [this] { look_for_joins(); });
}

void supervisor_state::report_absent(const std::vector<rank_id>& x) {
  stall_report report;
  report.ends = stalls().end;
  report.text = roster::describe_absence(x, self->clock().now() - last_join);
  if (!report.ends)
    report.text += fmt::format(
      "; the run waits for {:.0f} s in all",
      std::chrono::duration<double>(options.join_limit).count());
  report.all = {report.text};
  report.culprit = x.front();
  report.silent = x;
  report.ranks_know = false;
  options.on_stall(report);
  if (report.ends)
    fail({error_code::stalled, no_rank, {}, report.text});
}

// -- leaving ------------------------------------------------------------------

void supervisor_state::leave(rank_id x) {
  end_monitor();
  ranks->leave(x);
  if (auto i = members.find(x); i != members.end()) {
    self->demonitor(i->second);
    members.erase(i);
  }
  settle();
}

void supervisor_state::introduce(const inspector_actor& x) {
  inspector = x;
  for (auto& [rank, hdl] : watches)
    self->send(inspector, rank, hdl);
  if (monitor)
    self->send(inspector, monitor);
}

void supervisor_state::add_watch(rank_id x, const rank_watch_actor& hdl) {
  if (inspector)
    self->send(inspector, x, hdl);
  watches.emplace(x, hdl);
  if (!may_monitor || watches.size() != ranks->world_size())
    return;
  may_monitor = false;
  stall_monitor_config config;
  config.options = stalls();
  config.on_report = options.on_stall;
  for (auto& [rank, y] : watches)
    config.ranks.push_back(y);
  monitor = self->spawn(stall_monitor, std::move(config));
  if (inspector)
    self->send(inspector, monitor);
}

void supervisor_state::end_monitor() {
  may_monitor = false;
  watches.clear();
  if (monitor)
    self->send_exit(monitor, caf::exit_reason::user_shutdown);
  monitor = nullptr;
}

void supervisor_state::on_down(const caf::down_msg& x) {
  if (refused.erase(x.source) > 0)
    return settle();
  auto is_source = [&](auto& y) { return y.second.address() == x.source; };
  auto i = std::find_if(members.begin(), members.end(), is_source);
  if (i == members.end())
    return;
  auto rank = i->first;
  members.erase(i);
  end_monitor();
  settle();
  if (auto end = ended.find(rank); end != ended.end())
    return lose(end->second);
  if (options.report_grace.count() == 0)
    return on_grace_over(rank);
  self->delayed_send(self, options.report_grace, deadline_atom_v, rank);
}

void supervisor_state::on_result(const failure& x) {
  ended.emplace(x.rank, x);
  auto absent = ranks->absent();
  if (std::find(absent.begin(), absent.end(), x.rank) != absent.end())
    refuse_absence();
  // While it is a member, its goodbye may still be on the way, ahead of the end
  // of its connection.
  else if (!members.contains(x.rank))
    lose(x);
}

void supervisor_state::refuse_absence() {
  // As long as nobody waits, it may be that no rank wants to join.
  if (failed || waiting.empty())
    return;
  for (auto x : ranks->absent())
    if (auto end = ended.find(x); end != ended.end())
      return end_by(end->second);
}

void supervisor_state::end_elsewhere(const failure& x) {
  for (auto& [machine, hdl] : launchers)
    self->send(hdl, stall_atom_v, x);
}

void supervisor_state::add_launcher(uint64_t machine,
                                    const launcher_link_actor& hdl) {
  launchers.insert_or_assign(machine, hdl);
  options.on_launcher(machine);
}

caf::result<std::vector<uint64_t>> supervisor_state::tell_course(bool again) {
  if (launchers.empty())
    return std::vector<uint64_t>{};
  auto promise = self->make_response_promise<std::vector<uint64_t>>();
  auto left = std::make_shared<size_t>(launchers.size());
  auto heard = std::make_shared<std::vector<uint64_t>>();
  auto settle = [promise, left, heard]() mutable {
    if (--*left == 0)
      promise.deliver(*heard);
  };
  for (auto& [machine, hdl] : launchers)
    self->request(hdl, course_limit, again_atom_v, again)
      .then(
        [settle, heard, x = machine]() mutable {
          heard->push_back(x);
          settle();
        },
        [settle](const caf::error&) mutable { settle(); });
  return promise;
}

void supervisor_state::on_stop(rank_id x, bool is_stopped) {
  if (!is_stopped)
    stopped.erase(x);
  else if (stopped.emplace(x, self->clock().now()).second)
    self->delayed_send(self, seconds_of(stalls().timeout), stall_atom_v, x);
}

void supervisor_state::judge_stop(rank_id x) {
  auto i = stopped.find(x);
  if (i == stopped.end() || failed || closing)
    return;
  auto since = self->clock().now() - i->second;
  if (monitor) { // it reports this one while it runs
    self->delayed_send(self, seconds_of(stalls().timeout), stall_atom_v, x);
    return;
  }
  stall_report report;
  report.ends = stalls().end;
  report.text = ranks->describe_stop(x, since);
  report.all = {report.text};
  report.culprit = x;
  report.silent = {x};
  report.ranks_know = false;
  options.on_stall(report);
  // Without a launcher of smp, nothing else would end the processes.
  if (report.ends) {
    failure why{error_code::stalled, no_rank, {}, report.text};
    for (auto& [rank, hdl] : watches)
      self->send(hdl, stall_atom_v, why);
    if (!ranks->complete())
      return fail(why);
  }
  // Like the monitor: each report comes after twice the time.
  self->delayed_send(self, since, stall_atom_v, x);
}

void supervisor_state::on_grace_over(rank_id x) {
  std::set<rank_id> connected;
  for (auto& [rank, hdl] : members)
    connected.insert(rank);
  lose(ranks->loss_of(x, connected));
}

void supervisor_state::lose(const failure& x) {
  if (!ranks->lose(x))
    return;
  end_monitor();
  members.erase(x.rank);
  end_by(x);
  for (auto& [rank, hdl] : members)
    self->send(hdl, down_atom_v, x);
  settle();
}

void supervisor_state::fail(const failure& x) {
  if (failed)
    return;
  failed = x;
  for (auto& [rank, y] : std::exchange(waiting, {}))
    y.deliver(welcome{{}, x});
}

void supervisor_state::on_exit(const caf::exit_msg& x) {
  closing = true;
  reason = x.reason;
  end_monitor();
  self->delayed_send(self, std::chrono::seconds(2), deadline_atom_v);
  settle();
}

void supervisor_state::settle() {
  if (closing && all_have_heard())
    self->quit(reason);
}

bool supervisor_state::all_have_heard() const {
  if (ranks->complete())
    return failed || members.empty();
  // Ranks that were refused must hear why. The reply may still be in this
  // process, which is about to end.
  return members.empty() && refused.empty();
}

supervisor_status supervisor_state::status() const {
  supervisor_status result{
    ranks->world_size(), ranks->present(), ranks->gone(), ranks->losses(), {}};
  for (auto& [rank, since] : stopped)
    result.stopped.push_back(rank);
  return result;
}

// -- behavior -----------------------------------------------------------------

supervisor_actor::behavior_type supervisor(supervisor_state::pointer self,
                                           supervisor_host::options options) {
  auto& st = self->state;
  st.ranks.emplace(options.world_size, options.run_id);
  st.options = std::move(options);
  self->delayed_send(self, st.options.join_limit, deadline_atom_v);
  st.last_join = self->clock().now();
  st.look_for_joins();
  self->set_down_handler(
    [self](const caf::down_msg& x) { self->state.on_down(x); });
  self->set_exit_handler(
    [self](const caf::exit_msg& x) { self->state.on_exit(x); });
  // Ignored: a member that cannot take a message is about to be lost anyway.
  self->set_error_handler([](const caf::error&) {});
  return {
    [self](const member& x, const member_actor& hdl) {
      return self->state.join(x, hdl);
    },
    [self](rank_id x, const rank_watch_actor& hdl) {
      self->state.add_watch(x, hdl);
    },
    [self](const inspector_actor& x) { self->state.introduce(x); },
    [self](goodbye_atom, rank_id x) { self->state.leave(x); },
    [self](down_atom, const failure& x) { self->state.lose(x); },
    [self](goodbye_atom, const failure& x) { self->state.on_result(x); },
    [self](uint64_t machine, const launcher_link_actor& x) {
      self->state.add_launcher(machine, x);
    },
    [self](stall_atom, const failure& x) { self->state.end_elsewhere(x); },
    [self](again_atom, bool x) { return self->state.tell_course(x); },
    [self](stall_atom, rank_id x, bool stopped) {
      self->state.on_stop(x, stopped);
    },
    [self](stall_atom, rank_id x) { self->state.judge_stop(x); },
    [self](deadline_atom) { self->state.on_deadline(); },
    [self](deadline_atom, rank_id x) { self->state.on_grace_over(x); },
    [self](status_atom) { return self->state.status(); },
  };
}

} // namespace smp
