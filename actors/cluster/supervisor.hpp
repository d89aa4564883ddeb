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

  /// When every rank has its RANK WATCH, a STALL MONITOR begins.
  void add_watch(rank_id x, const rank_watch_actor& hdl);

  /// An INSPECTOR wants to hear of what `add_watch` hears of.
  void introduce(const inspector_actor& x);

  /// Ends the STALL MONITOR: a rank that leaves or is lost is no stall.
  void end_monitor();

  void on_down(const caf::down_msg& x);
  void on_deadline();

  /// Where the ranks are on many machines, the deadline is minutes away, and of
  /// a rank that is stopped before it joined perhaps nobody can tell: says
  /// once who is missing when nobody has joined for a while.
  void look_for_joins();
  void report_absent(const std::vector<rank_id>& x);

  stall_options stalls() const {
    return options.stalls.value_or(stall_options{});
  }

  /// Lets the others say goodbye first, unless the run failed.
  void on_exit(const caf::exit_msg& x);

  /// Goes on with `on_exit`.
  void settle();
  bool all_have_heard() const;

  /// A signal stopped the process of a rank, or let it go on.
  void on_stop(rank_id x, bool stopped);

  /// Reports such a rank unless a STALL MONITOR does.
  void judge_stop(rank_id x);

  /// The connection broke, and nobody told a better cause in time.
  void on_grace_over(rank_id x);

  /// A rank is lost: tells the others, once.
  void lose(const failure& x);

  /// Ends the run: whoever joins or waits to join gets `x`.
  void fail(const failure& x);

  /// Tells of the rank that is the cause, and fails.
  void end_by(const failure& x);

  supervisor_status status() const;

  pointer self;
  supervisor_host::options options;
  std::optional<roster> ranks;
  std::map<rank_id, member_actor> members;
  /// Were told that they do not fit, and did not end yet.
  std::set<caf::actor_addr> refused;
  std::map<rank_id, caf::typed_response_promise<welcome>> waiting;
  std::map<rank_id, rank_watch_actor> watches;
  stall_monitor_actor monitor;
  inspector_actor inspector;
  std::map<rank_id, caf::actor_clock::time_point> stopped;
  bool may_monitor = true; // a monitor may still begin
  caf::actor_clock::time_point last_join;
  failure failed; // the first cause
  bool closing = false;
  caf::error reason;
};

supervisor_actor::behavior_type supervisor(supervisor_state::pointer self,
                                           supervisor_host::options options);

} // namespace smp
