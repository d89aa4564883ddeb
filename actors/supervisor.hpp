#pragma once

#include "actors/actors.hpp"
#include "actors/roster.hpp"

#include <caf/stateful_actor.hpp>
#include <caf/typed_response_promise.hpp>

#include <map>
#include <optional>

namespace smp {

struct supervisor_state {
  static inline const char* name = "smp.supervisor";

  using pointer = supervisor_actor::stateful_pointer<supervisor_state>;

  explicit supervisor_state(pointer self) : self(self) {
    // nop
  }

  caf::result<welcome> join(const member& x, const member_actor& hdl);
  void leave(rank_id x);
  void on_down(const caf::down_msg& x);
  void on_deadline();

  /// Lets the others say goodbye first, unless the run failed.
  void on_exit(const caf::exit_msg& x);

  /// Goes on with `on_exit`.
  void settle();

  /// The connection broke, and nobody told a better cause in time.
  void on_grace_over(rank_id x);

  /// A rank is lost: tells the others, once.
  void lose(const failure& x);

  /// Ends the run: who joins or waits to join hears `x`.
  void fail(const failure& x);

  supervisor_status status() const;

  pointer self;
  supervisor_host::options options;
  std::optional<roster> ranks;
  std::map<rank_id, member_actor> members;
  std::map<rank_id, caf::typed_response_promise<welcome>> waiting;
  failure failed; // the first cause
  bool closing = false;
  caf::error reason;
};

supervisor_actor::behavior_type supervisor(supervisor_state::pointer self,
                                           supervisor_host::options options);

} // namespace smp
