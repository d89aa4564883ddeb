#pragma once

// How far a run came and how it ended: what our launcher knows, and writes to
// the run directory.

#include "transport/file_descriptor.hpp"

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

// -- from rank 0 to its launcher ----------------------------------------------

/// Variable of a rank: the number of the descriptor for `tell_stage`.
inline constexpr const char* stage_descriptor_variable = "SMP_STAGE_FD";

/// @returns the descriptor that the ranks of a launcher inherit
/// @throws error (config) if the system cannot provide one
file_descriptor stage_descriptor();

/// Reports that rank 0 reached `x`. Does nothing without our launcher.
void tell_stage(run_stage x);

/// @param fd a `stage_descriptor`
/// @returns how far rank 0 came
run_stage told_stage(int fd);

// -- in the run directory -----------------------------------------------------

struct run_outcome {
  int exit_code = 0;
  /// Empty if there is none.
  std::string cause;
  run_stage reached = run_stage::start;
};

/// @returns RUN_DIR/end.json
std::string end_path(const std::string& run_dir);

void write_run_outcome(const std::string& run_dir, const run_outcome& x);

/// @returns nothing if no launcher of ours has left one there
std::optional<run_outcome> read_run_outcome(const std::string& run_dir);

} // namespace smp
