#pragma once

// Starts the ranks of a run, or of this machine's share of it, as processes
// and owns them.

#include "actors/stalls/stall_judge.hpp"
#include "runtime/config/session_config.hpp"

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// One of several machines of a run, each with a launcher of its own.
struct node_options {
  /// Of each machine, in their order; empty: there is one.
  std::vector<uint64_t> ranks_of;
  /// Which of them this one is. The first has the SUPERVISOR.
  uint64_t node = 0;
  /// Where the first machine is reached.
  std::string master;
  uint16_t port = 0;
};

struct launch_options {
  /// What each rank runs; default: this program with its own arguments.
  std::vector<std::string> command;
  uint64_t ranks = 1;
  node_options nodes;
  /// What it says of the network counts where there are several machines.
  session_config session;
  /// Set for every rank on top of this process's variables.
  std::map<std::string, std::string> environment;
  /// Each rank writes `log_dir`/log-RANK.txt, and rank 0 to the console too.
  /// They know it as `session::run_dir`. Empty: all ranks write to the console;
  /// on other machines than the first, what the first one says.
  std::string log_dir;
  /// An exit code of a rank that, as 0, is a result and no failure.
  int verdict = 0;
  /// Within this time each rank has begun its session, or has ended. Where
  /// there are several machines, `patience_between_machines` counts.
  std::chrono::milliseconds join_limit{30000};
  /// When the ranks are stalled, and what follows; not set: as the session of
  /// rank 0 says.
  std::optional<stall_options> stalls;
  /// After a failure all ranks are gone within this time.
  std::chrono::milliseconds grace{2000};
  /// After Ctrl-C the ranks have this time for a clean end.
  std::chrono::milliseconds interrupt_grace{30000};
};

/// Hosts the SUPERVISOR (on the first machine), runs the ranks of this machine
/// and returns when all are gone. The
/// first failure ends all of them, and one line on stderr names the rank and
/// its signal or exit code, or how the ranks are stalled; unless rank 0 ended
/// for the same reason with a documented code and has said so itself. The last
/// report of a stall is left in `log_dir`/stall.json, the end of the run in
/// end.json there, and through that folder one can look at the run
/// (docs/inspect.md). Ctrl-C is passed on to
/// the ranks; a second one kills them. Call it from the main thread: the ranks
/// die with the thread that started them, so that even a killed launcher leaves
/// none behind.
/// @returns the exit code: 0 done, `verdict` if a rank came to it, 3 a rank
/// failed, 4 stalled, 130 interrupted; 2, 4 and 5 as the failed rank returned
/// them
/// @throws error (config) if the command cannot be started, or if several
/// machines are to talk over a network without keys or trust
int launch(const launch_options& x);

} // namespace smp
