#pragma once

// What one rank does and waits for, readable without asking its actors.

#include "actors/board/context_view.hpp"
#include "actors/protocol/rank_view.hpp"
#include "transport/flight/flight_record.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// The stall search must not depend on anything that may be stuck: neither the
/// actors of the rank nor the user's thread. So all of them note here what they
/// do, and any thread may read it. Thread-safe; an entry costs tens of
/// nanoseconds.
class rank_board {
public:
  using clock = std::chrono::steady_clock;

  /// @param record notes what happens; null: one in memory of its own
  rank_board(rank_id self, uint64_t world_size,
             std::shared_ptr<flight_record> record = {});

  /// How to name modules in texts; null: by number.
  void name_modules(std::function<std::string(module_id)> f);

  /// @returns the path of a module; empty if it has none.
  std::string path_of(module_id x) const;

  /// Notes that something happened which changes what the rank does next.
  void note() noexcept {
    ++progress_;
  }

  // -- the user's thread ------------------------------------------------------

  void main_waits(completion_ptr x, const wait_reason& why);

  void main_executes();

  /// See `activity::ends_step`.
  void main_ends_step(bool x);

  /// The rank is about to leave the run: what it does no longer matters.
  void leave();

  /// @param bubble share of the step during which this rank executed nothing
  void step_ended(double bubble);

  // -- WORKER CONTEXTS: the token, as their MODULE SERVER sees it -------------

  /// @returns what a context does; any thread, must not wait.
  using looker = std::function<context_view()>;

  /// A context began.
  void add(context_id ctx, looker look);

  /// The context has the token.
  void executes(context_id ctx);

  /// The context returned the token and waits for the answer to `asks`.
  void parked(context_id ctx, request_id asks);

  /// The context's wait is over; it waits only for the token now.
  void answered(context_id ctx);

  /// The context returned the token and serves nothing.
  void idle(context_id ctx);

  /// The context died.
  void lost(context_id ctx);

  /// The device still works for so many executions that returned the token.
  void device_works(uint64_t executions);

  // -- messages ---------------------------------------------------------------

  void sent(rank_id to) noexcept {
    count(sent_, to);
  }

  /// The handler of a message, and all work it did inline, has returned.
  void taken(rank_id from) noexcept {
    count(taken_, from);
  }

  // -- events -----------------------------------------------------------------

  /// What happened, for readers after the fact.
  flight_record& record() const noexcept {
    return *record_;
  }

  // -- readers ----------------------------------------------------------------

  rank_id self() const noexcept {
    return self_;
  }

  /// @returns a number that differs from the last one if anything happened.
  uint64_t look();

  /// @returns a view, except for the fields that only the actors can fill in.
  rank_view view();

  /// Seconds since this board was made, and those in which a context with the
  /// token or, outside of a step, the user's thread executed.
  struct usage {
    double up = 0;
    double busy = 0;
    std::optional<double> bubble; // of the last step
  };

  usage look_at_usage() const;

  /// @returns "module b, microbatch 0, forward".
  std::string describe(module_id x, microbatch_id m, phase what) const;

private:
  struct context_entry {
    looker look = [] { return context_view{}; };
    /// The request whose answer it waits for, if it waits for an answer.
    request_id asks;
    bool answered = false;
    /// Number of calls within its execution at the last sample.
    uint64_t calls_seen = 0;
    /// When it got the token, or when a sample last saw a new call.
    clock::time_point moved;
  };

  using counters = std::vector<std::atomic<uint64_t>>;

  void count(counters& xs, rank_id who) noexcept {
    if (who.value < xs.size())
      ++xs[who.value];
    ++progress_;
  }

  std::string name_of(module_id x) const;
  std::string brief(const context_view& x) const;
  std::string describe(const context_view& x) const;
  std::string describe_wait(const context_view& x,
                            const wait_reason& why) const;
  std::string brief_wait(const context_view& x, const wait_reason& why) const;
  activity describe(const context_entry& x, bool executes) const;

  /// Adds the time until now to `busy_` if something executed in it.
  void account();

  /// Detects calls that executions made since the last sample.
  void sample();

  const rank_id self_;
  const std::shared_ptr<flight_record> record_;
  std::atomic<uint64_t> progress_ = 0;
  uint64_t looked_at_ = 0; // what `look` returned last
  counters sent_;          // by rank
  counters taken_;         // by rank

  mutable std::mutex mutex_;
  std::function<std::string(module_id)> names_;
  std::map<context_id, context_entry> contexts_;
  std::optional<context_id> executing_; // holder of the token
  uint64_t launched_ = 0;               // executions that the device works for
  clock::time_point launched_since_;
  completion_ptr main_wait_; // null: it executes
  wait_reason main_reason_;
  bool main_ends_step_ = false;
  clock::time_point main_since_ = clock::now();
  bool left_ = false;
  const clock::time_point made_ = clock::now();
  clock::time_point accounted_ = made_;
  clock::duration busy_{0}; // until `accounted_`
  std::optional<double> bubble_;
};

/// The waiter of the user's thread: notes on the board what it waits for.
class noting_waiter final : public waiter {
public:
  explicit noting_waiter(rank_board& board) : board_(board) {
    // nop
  }

  void wait(const completion_ptr& x, const wait_reason& why) override;

private:
  rank_board& board_;
  waiter& plain_ = waiter::current();
};

} // namespace smp
