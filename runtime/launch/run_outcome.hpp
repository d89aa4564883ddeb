#pragma once

// How far a run came and how it ended: what our launcher knows, and writes to
// the run directory.

#include "actors/stalls/stall_judge.hpp"
#include "transport/files/file_descriptor.hpp"

#include <cstdint>
#include <optional>
#include <string>

namespace smp {

enum class run_stage : uint8_t {
  start,   // the processes start
  session, // all ranks have joined
  step,    // the first step has succeeded
};

constexpr run_stage last_of(run_stage) noexcept {
  return run_stage::step;
}

/// @returns "start", "session", "step"
const char* to_string(run_stage x) noexcept;

// -- from ranks to their launcher ---------------------------------------------

/// How far a rank came.
struct rank_progress {
  uint64_t sessions = 0; // that began
  uint64_t steps = 0;    // that began, in all sessions
  uint64_t done = 0;     // of these, those that succeeded
  uint64_t in_step = 0;  // 1: between the two

  run_stage stage() const noexcept;
};

/// Variable of a rank: the number of the descriptor of `progress_report`.
inline constexpr const char* progress_descriptor_variable = "SMP_PROGRESS_FD";

/// @returns the descriptor that the ranks of a launcher inherit
/// @throws error (config) if the system cannot provide one
file_descriptor progress_descriptor();

/// Tells the launcher of this rank how far it is. Does nothing without one.
class progress_report {
public:
  /// Goes on where an earlier session of this process ended.
  progress_report();

  void session_begins();

  /// A step begins, or has succeeded.
  void operator()(bool begins);

private:
  void tell() const;

  int fd_ = -1;
  uint64_t slot_ = 0;
  rank_progress now_;
};

/// @param fd a `progress_descriptor`
/// @param local_rank among the ranks of this machine
rank_progress told_progress(int fd, uint64_t local_rank);

// -- in the run directory -----------------------------------------------------

struct run_outcome {
  int exit_code = 0;
  /// Empty if there is none.
  std::string cause;
  run_stage reached = run_stage::start;
  /// How often the run was started again.
  uint64_t restarts = 0;
};

/// @returns RUN_DIR/end.json
std::string end_path(const std::string& run_dir);

void write_run_outcome(const std::string& run_dir, const run_outcome& x);

/// @returns RUN_DIR/stall.json
std::string stall_path(const std::string& run_dir);

/// For later reading: what was stalled last, and which rank waited for which.
void write_stall(const std::string& run_dir, const stall_report& x);

/// @returns nothing if no launcher of ours has left one there
std::optional<run_outcome> read_run_outcome(const std::string& run_dir);

} // namespace smp
