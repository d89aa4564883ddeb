#pragma once

#include "actors/protocol/request.hpp"

#include <memory>

namespace smp {

/// Receives the events of an executor, on any thread; must not block. Before
/// `called` or `returned` returns, the execution may be resumed or a new one
/// started, and the calling thread may serve other executions of the rank.
class executor_listener {
public:
  virtual ~executor_listener() = default;

  /// The execution parked at `x` and no longer runs: its token is free.
  virtual void called(call x) = 0;

  /// The execution sent the promise `x` and continues.
  virtual void asked(call x) = 0;

  /// The execution ended and no longer runs: its token is free.
  virtual void returned(outcome x) = 0;
};

/// User code must stop in the middle of a call and let others run, which no
/// actor handler may do. An executor hides how this works: it runs one
/// request at a time, with or without a thread of its own (R24, R25). Each
/// `start` and each `resume` is followed by any number of `asked` events and
/// then by exactly one `called` or `returned`. `start` and `resume` return
/// at once; they are called only while the rank holds its execution token.
/// The destructor unwinds a parked execution as cancelled, then joins the
/// thread.
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
