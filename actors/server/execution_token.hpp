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
/// rank, so of all virtual ranks of a process only one may execute at a time
/// (R26). They share this token. Nobody blocks on it: a rank that finds it
/// taken gets in line and is called when its turn comes. Thread-safe.
class execution_token {
public:
  using seat = uint64_t;

  /// Makes the caller able to ask for the token.
  /// @param granted called when a token that was taken comes to this seat, on
  ///        the thread that gave it back; must not block
  seat enroll(std::function<void()> granted);

  /// @returns whether `x` has the token now; if not, it stands in line.
  /// @pre `x` neither has the token nor stands in line
  bool try_acquire(seat x);

  /// Hands the token to the first in line. @pre `x` has the token
  void release(seat x);

  /// Ends the seat; gives the token back if `x` has it, knowingly or not.
  void leave(seat x);

private:
  using callback_ptr = std::shared_ptr<const std::function<void()>>;

  /// Chooses the next owner. @returns whom to call once the lock is gone
  callback_ptr pass_on();

  std::mutex mutex_;
  seat last_ = 0;
  std::optional<seat> owner_;
  std::deque<seat> line_;
  std::map<seat, callback_ptr> seats_;
};

} // namespace smp
