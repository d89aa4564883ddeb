#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

namespace smp {

/// Random generators and interpreter switches belong to the process, not to a
/// rank, so only one of all virtual ranks in a process may execute at a time
/// (R26). They share this token. Taking it never blocks: a rank that finds it
/// taken queues up and is called when its turn comes. Thread-safe.
class execution_token {
public:
  using seat = uint64_t;

  /// Registers a rank that will ask for the token.
  /// @param granted called when a token that was taken passes to this seat, on
  ///        the thread that released it; must not block
  seat enroll(std::function<void()> granted);

  /// @returns whether `x` has the token now; if not, it is in the queue.
  /// @pre `x` neither has the token nor is in the queue
  bool try_acquire(seat x);

  /// Passes the token to the first in the queue. @pre `x` has the token
  void release(seat x);

  /// Ends the seat; releases the token if `x` has it, knowingly or not.
  void leave(seat x);

private:
  using callback_ptr = std::shared_ptr<const std::function<void()>>;

  /// Chooses the next owner. @returns its callback, to call without the lock
  callback_ptr pass_on();

  std::mutex mutex_;
  seat last_ = 0;
  std::optional<seat> owner_;
  std::deque<seat> line_;
  std::map<seat, callback_ptr> seats_;
};

} // namespace smp
