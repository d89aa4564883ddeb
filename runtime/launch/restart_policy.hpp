#pragma once

// Whether a run that lost a rank is started again, and when. Knows no
// processes.

#include "transport/error.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// How the ranks of a run ended, all of them.
struct attempt_end {
  /// None if they ended well.
  failure cause;
  /// Exit code of the rank that is the cause; 0: a signal ended it, or it is
  /// lost in another way.
  int code = 0;
  /// The rank ended before the others, with a code that is no error.
  bool early = false;
  bool interrupted = false;
  /// All ranks waited for each other, which is the work of the program.
  bool deadlock = false;
  /// Training steps that are done, with those before the checkpoint from which
  /// these ranks went on, and whether any of them is theirs.
  uint64_t steps = 0;
  bool made_steps = false;
};

struct restart_decision {
  bool again = false;
  std::chrono::milliseconds wait{0};
  /// Why not, where the run would be started again otherwise.
  std::string why_not = {};
};

/// A lost rank is bad luck, and the next attempt goes further; or it is the
/// work of the program, and ends every attempt at the same place.
class restart_policy {
public:
  /// @param limit how often a run is started again; 0: never
  explicit restart_policy(uint64_t limit) : limit_(limit) {
    // nop
  }

  /// @returns what follows the end of an attempt. Waits grow from 1 s to 60 s
  /// as long as no attempt gets further than those before.
  restart_decision decide(const attempt_end& x);

  /// How often the run was started again.
  uint64_t restarts() const noexcept {
    return restarts_;
  }

  uint64_t limit() const noexcept {
    return limit_;
  }

private:
  struct series {
    uint64_t count = 0;
    failure first;
  };

  bool is_loss(const attempt_end& x) const;

  uint64_t limit_;
  uint64_t restarts_ = 0;
  std::chrono::seconds wait_{0};
  uint64_t furthest_ = 0;
  /// Failures since the furthest step was reached, by steps done.
  std::map<uint64_t, series> failures_;
};

// -- several machines ---------------------------------------------------------

/// @returns the largest number of ranks, at most `x`, with which a run can go
/// on; 0: with none
using rank_limit = std::function<uint64_t(uint64_t x)>;

/// @param all number of ranks of each machine, in order
/// @param here those that are there
/// @param fit not set: the run needs all its ranks
/// @returns number of ranks of each machine in the next attempt: of those that
/// are there, the first ones count; if they are too few, `all`
std::vector<uint64_t> shares_among(const std::vector<uint64_t>& all,
                                   const std::vector<uint64_t>& here,
                                   const rank_limit& fit);

/// @returns the ranks of all machines
uint64_t ranks_in(const std::vector<uint64_t>& shares);

/// Machines that join an attempt in which they have no ranks.
class late_machines {
public:
  /// @param all as in `shares_among`
  /// @param now number of ranks of each machine in this attempt
  late_machines(std::vector<uint64_t> all, std::vector<uint64_t> now,
                rank_limit fit);

  /// A launcher has joined. One thread at a time.
  /// @returns whether the run is to start again for it: once
  bool note(uint64_t machine);

  /// @returns the machine for which it is to start again. Any thread
  std::optional<uint64_t> get() const;

private:
  std::vector<uint64_t> all_;
  std::vector<uint64_t> now_;
  std::vector<uint64_t> here_;
  rank_limit fit_;
  std::atomic<int64_t> returned_ = -1;
};

// -- what the launcher and the program tell each other ------------------------

/// Where a run stands whose ranks are gone.
struct run_position {
  /// As in `attempt_end`.
  uint64_t steps = 0;
  bool made_steps = false;
  /// The steps that the next ranks need not make, and the checkpoint from which
  /// they go on; empty: they begin anew.
  uint64_t next_from = 0;
  std::string checkpoint;
  /// The checkpoint is the newest of this run, wherever the run once began.
  bool newest = false;
};

/// What is kept of a restart.
struct restart_note {
  uint64_t number = 0;    // from 1
  uint64_t at_step = 0;   // the step that was under way, from 1
  uint64_t from_step = 0; // the last one that counts
  std::string cause;
};

} // namespace smp
