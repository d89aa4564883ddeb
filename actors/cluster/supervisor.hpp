#pragma once

#include "actors/cluster/roster.hpp"
#include "actors/protocol/actors.hpp"

#include <caf/send.hpp>
#include <caf/stateful_actor.hpp>
#include <caf/typed_response_promise.hpp>

#include <map>
#include <optional>
#include <set>
#include <vector>

namespace smp {

struct supervisor_state {
  static inline const char* name = "smp.supervisor";

  using pointer = supervisor_actor::stateful_pointer<supervisor_state>;

  explicit supervisor_state(pointer self) : self(self) {
    // nop
  }

  ~supervisor_state() {
    if (monitor)
      caf::anon_send_exit(monitor, caf::exit_reason::kill);
  }

  caf::result<welcome> join(const member& x, const member_actor& hdl);
  welcome refuse(const failure& x, const member_actor& hdl);
  void leave(rank_id x);

  /// Starts the STALL MONITOR once every rank has its RANK WATCH.
  void add_watch(rank_id x, const rank_watch_actor& hdl);

  /// Registers an INSPECTOR, which gets all that `add_watch` gets.
  void introduce(const inspector_actor& x);

  /// Ends the STALL MONITOR: a rank that leaves or is lost is not a stall.
  void end_monitor();

  void on_down(const caf::down_msg& x);
  void on_deadline();

  /// Reports absent ranks once if no rank has joined for a while: with many
  /// machines the join deadline is minutes away, and it may be that nothing
  /// reports a rank that was stopped before it joined.
  void look_for_joins();
  void report_absent(const std::vector<rank_id>& x);

  stall_options stalls() const {
    return options.stalls.value_or(stall_options{});
  }

  /// Waits for the ranks' goodbyes first, unless the run failed.
  void on_exit(const caf::exit_msg& x);

  /// Completes `on_exit` once all members have heard the outcome.
  void settle();
  bool all_have_heard() const;

  /// Ends the run on machines whose ranks may all be silent.
  void end_elsewhere(const failure& x);

  /// Tells other machines what follows the end of this attempt at the run.
  caf::result<std::vector<uint64_t>> tell_course(bool again);

  /// A signal stopped or continued the process of a rank.
  void on_stop(rank_id x, bool stopped);

  /// Reports a stopped rank unless the STALL MONITOR does.
  void judge_stop(rank_id x);

  /// A process ended with a result: a loss unless its rank left before.
  void on_result(const failure& x);

  /// Before all have joined: a rank that ended will never join.
  void refuse_absence();

  /// The connection broke, and no better cause arrived in time.
  void on_grace_over(rank_id x);

  /// Marks a rank as lost and tells the others, once.
  void lose(const failure& x);

  /// Ends the run: ranks that wait to join, or join later, get `x`.
  void fail(const failure& x);

  /// Reports the rank that is the cause, then fails the run.
  void end_by(const failure& x);

  supervisor_status status() const;

  pointer self;
  supervisor_host::options options;
  std::optional<roster> ranks;
  std::map<rank_id, member_actor> members;
  void add_launcher(uint64_t machine, const launcher_link_actor& hdl);

  /// Of other machines.
  std::map<uint64_t, launcher_link_actor> launchers;
  /// Members that were refused and have not ended yet.
  std::set<caf::actor_addr> refused;
  std::map<rank_id, caf::typed_response_promise<welcome>> waiting;
  std::map<rank_id, rank_watch_actor> watches;
  stall_monitor_actor monitor;
  inspector_actor inspector;
  std::map<rank_id, caf::actor_clock::time_point> stopped;
  /// Processes that ended with a result, and what that means if it was early.
  std::map<rank_id, failure> ended;
  bool may_monitor = true; // the monitor has not started, but may
  caf::actor_clock::time_point last_join;
  failure failed; // the first cause
  bool closing = false;
  caf::error reason;
};

supervisor_actor::behavior_type supervisor(supervisor_state::pointer self,
                                           supervisor_host::options options);

} // namespace smp
