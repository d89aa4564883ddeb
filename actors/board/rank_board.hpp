#pragma once

// What one rank does and waits for, readable from outside of its actors.

#include "actors/board/context_notes.hpp"
#include "actors/protocol/rank_view.hpp"

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

/// A search for stalls must not depend on what may be stuck: neither on the
/// actors of the rank nor on its user's thread. So all of them note here what
/// they do, and anybody may read it. Thread-safe; an entry costs tens of
/// nanoseconds.
class rank_board {
public:
  using slot_ptr = context_notes::slot_ptr;
  using clock = std::chrono::steady_clock;

  rank_board(rank_id self, uint64_t world_size);

  /// How modules are called; null: by their numbers.
  void name_modules(std::function<std::string(module_id)> f);

  /// @returns the path of a module, empty if there is none.
  std::string path_of(module_id x) const;

  /// Anything happened that changes what the rank does next.
  void note() noexcept {
    ++progress_;
  }

  // -- the user's thread ------------------------------------------------------

  void main_waits(completion_ptr x, const wait_reason& why);

  void main_executes();

  /// See `activity::ends_step`.
  void main_ends_step(bool x);

  /// The rank is about to leave: what it does no longer matters.
  void leave();

  /// @param bubble the share of the step in which nothing executed here
  void step_ended(double bubble);

  // -- WORKER CONTEXTS: the token, as their MODULE SERVER sees it -------------

  using notes_ptr = std::shared_ptr<context_notes>;

  /// @returns the notes of a context, a new one if there is none.
  notes_ptr notes_of(context_id ctx);

  /// The context has the token.
  void executes(context_id ctx);

  /// The context gave the token back and waits for the answer to `asks`.
  void parked(context_id ctx, request_id asks);

  /// What the context waited for came; it waits for the token only.
  void answered(context_id ctx);

  /// The context gave the token back and serves nothing.
  void idle(context_id ctx);

  /// The context died.
  void lost(context_id ctx);

  /// @returns the slot of the execution of `x`, or null.
  slot_ptr slot_of(request_id x) const;

  // -- messages ---------------------------------------------------------------

  void sent(rank_id to) noexcept {
    count(sent_, to);
  }

  /// A message was handed over, with all that follows at once.
  void taken(rank_id from) noexcept {
    count(taken_, from);
  }

  // -- readers ----------------------------------------------------------------

  rank_id self() const noexcept {
    return self_;
  }

  /// @returns a number that differs from the last one if anything happened.
  uint64_t look();

  /// @returns all of a view but what only the actors know.
  rank_view view();

  /// Time since this was made, and how much of it somebody executed: a context
  /// with the token or, outside of a step, the user's thread; in seconds.
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
    notes_ptr notes;
    /// What it waits for, if that is an answer.
    request_id asks;
    bool answered = false;
    /// Calls within its execution that were seen.
    uint64_t calls_seen = 0;
    /// When it got the token, or a look found another call.
    clock::time_point moved;
  };

  using counters = std::vector<std::atomic<uint64_t>>;

  void count(counters& xs, rank_id who) noexcept {
    if (who.value < xs.size())
      ++xs[who.value];
    ++progress_;
  }

  std::string name_of(module_id x) const;
  std::string brief(const context_notes::view& x) const;
  std::string describe(const context_notes::view& x) const;
  std::string describe_wait(const context_notes::view& x,
                            const wait_reason& why) const;
  std::string brief_wait(const context_notes::view& x,
                         const wait_reason& why) const;
  activity describe(const context_entry& x, bool executes) const;

  /// Counts the time until now for whoever executed, before that changes.
  void account();

  /// Notices calls that went on inside of executions.
  void sample();

  const rank_id self_;
  std::atomic<uint64_t> progress_ = 0;
  counters sent_;  // by rank
  counters taken_; // by rank

  mutable std::mutex mutex_;
  std::function<std::string(module_id)> names_;
  std::map<context_id, context_entry> contexts_;
  std::optional<context_id> executing_; // who has the token
  completion_ptr main_wait_;            // null: it executes
  wait_reason main_reason_;
  bool main_ends_step_ = false;
  clock::time_point main_since_ = clock::now();
  bool left_ = false;
  const clock::time_point made_ = clock::now();
  clock::time_point accounted_ = made_;
  clock::duration busy_{0}; // until `accounted_`
  std::optional<double> bubble_;
};

/// The waiter of the user's thread: writes down what it waits for.
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
