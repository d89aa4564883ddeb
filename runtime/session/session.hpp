#pragma once

// The user's entry point: one session per rank. It owns all state, so that N
// virtual ranks can run in one process.

#include "partition/rank_layout.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/step/step_stats.hpp"
#include "transport/fabric.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace smp {

class actor_host;
class rank_runtime;

/// Runs this process (or thread, see `virtual_world`) as one rank of a run.
/// The constructor joins the other ranks and returns when all have joined.
class session {
public:
  /// Joins as the rank that the environment names; without a launcher's
  /// environment the world is this process alone.
  /// @param settings what all ranks must have in common, one line
  /// "KEY = VALUE" each; default: such settings of `config`
  /// @throws error naming the ranks that did not join or that differ, and in
  /// which settings
  explicit session(session_config config, std::string settings = {});

  /// Joins as one virtual rank (used by `virtual_world`).
  session(session_config config, std::shared_ptr<rank_runtime> x);

  ~session();

  session(const session&) = delete;
  session& operator=(const session&) = delete;

  const session_config& config() const noexcept;

  /// Ranks and groups of this run.
  const rank_layout& layout() const noexcept;

  uint64_t rank() const noexcept;

  uint64_t size() const noexcept;

  uint64_t pp_rank() const noexcept;

  /// The directory for the files of the run, as our launcher created it: by
  /// `--ranks` and `--run-dir` of `init`, or by smp-train. Relative to the
  /// directory where the run was started. Empty if none, as under mpirun.
  std::string run_dir() const;

  /// Statistics of the last finished step on this rank.
  step_stats last_step() const;

  /// Messages and bytes since the session began, for this rank.
  fabric_stats traffic() const;

  /// Waits for the other ranks in a goodbye barrier, so that the end of this
  /// rank is not a loss. The destructor does it too, unless unwinding.
  /// @throws error after that, if a collective that completed on this rank was
  /// not one of all ranks; the destructor prints it
  void finish();

  /// The rank behind this session; for runtime/ and tests.
  rank_runtime& internals() const noexcept;

  const std::shared_ptr<rank_runtime>& shared_internals() const noexcept {
    return rank_;
  }

  /// @returns the session of the calling thread
  /// @throws error (config) if there is none
  static session& current();

  /// @returns the session of the calling thread, or null.
  static session* current_or_null() noexcept;

  /// Makes `x` the session of the calling thread.
  static void set_current(session* x) noexcept;

private:
  /// State that only a rank in its own process has.
  struct process;

  std::unique_ptr<process> process_;
  std::shared_ptr<rank_runtime> rank_;
  int unwinding_ = 0;
  bool finished_ = false;
};

/// Runs N ranks in this process over the loopback fabric (no UCX, no other
/// process): calls `body` once per rank, on a thread of its own with its
/// session as current. Returns when all returned; rethrows the first error.
struct virtual_world_options {
  session_config config;
  uint64_t seed = 1;
  /// Deliver messages in a seeded random order.
  bool reorder = false;
};

void run_virtual_world(uint64_t world_size, const virtual_world_options& x,
                       const std::function<void(session&)>& body);

/// The same over other fabrics, one for each rank.
/// @param host outlives them: they may hold state that refers to its actors
void run_virtual_world(const std::vector<std::shared_ptr<fabric>>& fabrics,
                       const std::shared_ptr<actor_host>& host,
                       session_config config,
                       const std::function<void(session&)>& body);

} // namespace smp
