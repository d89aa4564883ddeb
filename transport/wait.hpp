#pragma once

// All code that parks a thread does it here (R28): a WORKER CONTEXT then gives
// its token back, and the wait-for graph knows who waits for whom.

#include "transport/error.hpp"
#include "transport/ids.hpp"
#include "transport/wait_subject.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace smp {

/// Why a thread waits, for reports: "value of blocks.3.weight" from rank 1.
struct wait_reason {
  std::string what; // for people only
  std::optional<rank_id> from;
  /// The current reason during the wait, for reports. Any thread.
  std::function<wait_reason()> now = {};
  /// Number of this rank's request to `from` whose reply the wait needs.
  std::optional<uint64_t> asks = {};
  /// For ranks of other pipelines that share a module with this one.
  bool for_peers = false;
  wait_subject subject = {};
};

/// A one-shot event that ends well or with a failure. Thread-safe.
class completion {
public:
  using callback = std::function<void()>;

  /// Ends well. The first `set` or `fail` wins.
  void set();

  /// Ends with `x`. The first `set` or `fail` wins.
  void fail(failure x);

  bool done() const;

  /// @returns the failure, or an empty one; meaningful once `done`.
  failure cause() const;

  /// Calls `f` once when done, on the thread that ends this, or at
  /// once.
  void on_done(callback f);

private:
  void finish(failure x);

  mutable std::mutex mutex_;
  bool done_ = false;
  failure cause_;
  std::vector<callback> callbacks_;
};

using completion_ptr = std::shared_ptr<completion>;

/// @returns a completion that is done when all of `xs` are, or when the first
/// of them fails, with its failure.
completion_ptr all_of(const std::vector<completion_ptr>& xs);

/// @returns the reason of a wait for all of `xs`: at any time the reason of the
/// first one that is not done.
wait_reason
reason_of_all(std::vector<std::pair<completion_ptr, wait_reason>> xs);

/// Parks the calling thread until a completion is done.
class waiter {
public:
  virtual ~waiter() = default;

  /// Returns when `x` ended well.
  /// @throws error with the failure of `x`
  virtual void wait(const completion_ptr& x, const wait_reason& why) = 0;

  /// @returns the waiter of the calling thread: the one installed by the
  /// innermost `scoped_waiter`, else a plain one that blocks the thread.
  static waiter& current();
};

/// Makes `x` the waiter of the calling thread.
class scoped_waiter {
public:
  explicit scoped_waiter(waiter& x);
  ~scoped_waiter();
  scoped_waiter(const scoped_waiter&) = delete;
  scoped_waiter& operator=(const scoped_waiter&) = delete;

private:
  waiter* previous_;
};

/// What a thread may hold that others need while it waits: the lock of an
/// interpreter.
struct lock_of_waits {
  /// @returns what `take` wants; null: the calling thread does not hold it
  void* (*release)() = nullptr;
  void (*take)(void*) = nullptr;
  /// Asks for it on a thread of its own, unless it still does.
  /// @returns for how many seconds it has asked
  double (*ask)() = nullptr;
};

/// From now on every wait releases it first. Once, before there are waits.
void release_in_waits(const lock_of_waits& x) noexcept;

/// Asks whether threads get that lock; does not wait for it.
/// @returns for how many seconds an earlier question has had no answer
double ask_for_lock();

/// Releases that lock for its lifetime. Whoever blocks a thread on which user
/// code may run has one.
class released_lock {
public:
  released_lock() noexcept;
  ~released_lock();
  released_lock(const released_lock&) = delete;
  released_lock& operator=(const released_lock&) = delete;

private:
  void* held_;
};

/// A completion that carries a value when it ends well.
template <class T>
class awaited : public completion {
public:
  /// Stores `x`, then ends well. Only the first call may store.
  void set_value(T x) {
    value_ = std::move(x);
    set();
  }

  /// Parks until done. @throws error
  static T get(const std::shared_ptr<awaited>& x, const wait_reason& why) {
    waiter::current().wait(x, why);
    return std::move(x->value_);
  }

  /// Parks until done; several threads may read the value. @throws error
  static const T& peek(const std::shared_ptr<awaited>& x,
                       const wait_reason& why) {
    waiter::current().wait(x, why);
    return x->value_;
  }

private:
  T value_{};
};

} // namespace smp
