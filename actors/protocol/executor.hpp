#pragma once

#include "actors/protocol/request.hpp"

#include <memory>

namespace smp {

/// Hears what an executor did. Called from any thread; must not wait. What
/// parked or ended may be resumed or started again, and other executions of the
/// rank served on the calling thread, before `called` and `returned` return.
class executor_listener {
public:
  virtual ~executor_listener() = default;

  /// The execution parked at `x` and no longer runs: the token may go.
  virtual void called(call x) = 0;

  /// The execution sent the promise `x` and goes on.
  virtual void asked(call x) = 0;

  /// The execution ended and no longer runs: the token may go.
  virtual void returned(outcome x) = 0;
};

/// Running user code must stop in the middle of a call and let others run,
/// which no handler of an actor may do. An executor hides how: it runs one
/// request at a time, on a thread of its own or without any (R24, R25).
/// Each `start` and each `resume` is followed by any number of `asked` and then
/// exactly one `called` or `returned` of the listener. `start` and `resume`
/// return at once; they are called only while the rank holds its execution
/// token. The destructor makes a parked execution unwind as cancelled, then
/// joins.
class executor {
public:
  virtual ~executor() = default;

  /// Begins a request. @pre the executor is idle
  virtual void start(request x) = 0;

  /// Continues after `called`, with a value, a grant or an error.
  /// @pre the executor is parked
  virtual void resume(response x) = 0;
};

using executor_ptr = std::unique_ptr<executor>;

} // namespace smp
