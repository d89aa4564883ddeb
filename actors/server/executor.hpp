#pragma once

// What runs the code of a WORKER CONTEXT, in a header that does not include
// CAF.

#include "actors/board/context_view.hpp"
#include "actors/protocol/request.hpp"
#include "transport/flight/flight_record.hpp"

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

namespace smp {

struct server_handle;

/// User code must stop in the middle of a call and let others run, which no
/// actor handler may do. An executor hides how this works: it runs the requests
/// of one WORKER CONTEXT, one at a time, with or without a thread of its own
/// (R24, R25). It keeps the state of the context, and tells the MODULE SERVER
/// what the execution does: after each `start` and each `resume` it sends any
/// number of calls without waiting, and then either parks or returns.
class executor {
public:
  executor();

  /// @pre `close` was called, by the destructor of the derived class at last
  virtual ~executor();

  executor(const executor&) = delete;
  executor& operator=(const executor&) = delete;

  // -- MODULE SERVER ----------------------------------------------------------
  // `start` and `resume` return at once, and are called only while the rank
  // holds its execution token.

  /// Makes this run the requests of `id`, before it gets the first one.
  /// @param server is told what happens; null: nobody
  /// @param record notes it, and outlives this; null: none
  void attach(context_id id, std::shared_ptr<const server_handle> server,
              flight_record* record = nullptr);

  /// Begins a request (IDLE -> EXECUTING).
  /// @returns an error (internal) if the context is in another state, or ended
  /// @throws whatever `wake` throws, which is a defect
  virtual failure start(request x);

  /// Continues after `park`, with a value, a grant or an error
  /// (PENDING -> EXECUTING). Errors as for `start`.
  virtual failure resume(response x);

  /// Unwinds what runs, as cancelled, and joins its thread; starts nothing any
  /// more.
  void close();

  // -- anybody ----------------------------------------------------------------

  context_id id() const noexcept {
    return id_;
  }

  context_view look() const;

  // -- the execution ----------------------------------------------------------
  // The SERVER may run on the calling thread before `park` waits: the thread
  // has nothing else to do.

  /// Gives the token back until the response to `x` has arrived
  /// (EXECUTING -> PENDING).
  /// @throws error with the first failure of the execution (R6); from then on
  /// every call of it throws this
  virtual response park(call x);

  /// Sends the promise `x` without waiting for the response. Throws as `park`.
  virtual void send(call x);

protected:
  // -- what a derived class does ----------------------------------------------

  /// `start` or `resume` has left something to take.
  virtual void wake() = 0;

  /// Part of `close`.
  virtual void join() {
    // nop
  }

  /// The execution is about to make a call, and waits for `from` if it parks.
  /// @throws error if it must end instead
  virtual void begin_call(call_kind, std::optional<rank_id> /* from */) {
    // nop
  }

  /// The execution is about to return its token, in a call.
  virtual void switch_out() {
    // nop
  }

  /// Blocks the thread of the execution until `wake` or `join`.
  virtual void pause() {
    // nop
  }

  /// The execution has a token again.
  /// @throws error if it must end: because of `why`, or since this closes
  virtual void switch_in(const failure& /* why */) {
    // nop
  }

  // -- what it may use --------------------------------------------------------

  /// @returns a function that tells the SERVER that the device did what the
  /// execution launched until now; for any thread, also after `close`
  std::function<void()> teller_of_reached() const;

  /// @returns where the running execution is shown, until it ends
  call_slot* slot() const;

  request take_request() {
    note(flight_kind::executes);
    return std::move(request_);
  }

  response take_response() {
    return std::move(response_);
  }

  /// `park` for an execution that has no thread to block.
  void leave(call x);

  /// The execution ended and no longer runs (EXECUTING -> IDLE).
  void finish(outcome x);

  bool closing() const noexcept {
    return closing_;
  }

private:
  bool move(context_state from, context_state to);
  void note(flight_kind kind, const call* waits_for = nullptr) const;
  failure refusal() const;
  void give_up();

  template <class T>
  void tell(T x);

  context_id id_;
  std::shared_ptr<const server_handle> server_; // null once closed
  flight_record* record_ = nullptr;
  request request_;
  response response_;
  std::atomic<bool> closing_ = false;
  mutable std::mutex mutex_; // guards what follows
  context_view view_;
};

} // namespace smp
