#pragma once

// Starts the ranks of a run as processes of this machine and owns them.

#include "actors/stalls/stall_judge.hpp"

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace smp {

struct launch_options {
  /// What each rank runs; default: this program with its own arguments.
  std::vector<std::string> command;
  uint64_t ranks = 1;
  /// Set for every rank on top of this process's variables.
  std::map<std::string, std::string> environment;
  /// Each rank writes `log_dir`/log-RANK.txt, and rank 0 to the console too.
  /// Empty: all ranks write to the console.
  std::string log_dir;
  /// An exit code of a rank that, as 0, is a result and no failure.
  int verdict = 0;
  /// Within this time each rank has begun its session, or has ended.
  std::chrono::milliseconds join_limit{30000};
  /// When the ranks are stalled, and what follows.
  stall_options stalls;
  /// After a failure all ranks are gone within this time.
  std::chrono::milliseconds grace{2000};
  /// After Ctrl-C the ranks have this time for a clean end.
  std::chrono::milliseconds interrupt_grace{30000};
};

/// Hosts the SUPERVISOR, runs the ranks and returns when all are gone. The
/// first failure ends all of them, and one line on stderr names the rank and
/// its signal or exit code, or how the ranks are stalled; unless rank 0 ended
/// for the same reason with a documented code and has said so itself. The last
/// report of a stall is left in `log_dir`/stall.json. Ctrl-C is passed on to
/// the ranks; a second one kills them. Call it from the main thread: the ranks
/// die with the thread that started them, so that even a killed launcher leaves
/// none behind.
/// @returns the exit code: 0 done, `verdict` if a rank came to it, 3 a rank
/// failed, 4 stalled, 130 interrupted; 2, 4 and 5 as the failed rank returned
/// them
/// @throws error (config) if the command cannot be started
int launch(const launch_options& x);

} // namespace smp
