#pragma once

// Starts the ranks of a run, or of this machine's share of it, as processes
// and owns them.

#include "actors/stalls/stall_judge.hpp"
#include "runtime/config/session_config.hpp"
#include "runtime/launch/restart_policy.hpp"
#include "runtime/process/run_server.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// One of several machines of a run, each with a launcher of its own.
struct node_options {
  /// Number of ranks of each machine, in order; empty: only one machine.
  std::vector<uint64_t> ranks_of;
  /// Index of this machine. The first one hosts the SUPERVISOR.
  uint64_t node = 0;
  /// Name or address of the first machine.
  std::string master;
  uint16_t port = 0;
};

/// What a program does whose run may be started again.
struct restart_options {
  /// How often; 0: never. The same on all machines.
  uint64_t limit = 0;
  /// Called on the first machine when its ranks are gone.
  std::function<run_position()> look;
  /// Called there before each restart, to keep it on record.
  std::function<void(const restart_note&)> record;
  /// Set where a run over several machines goes on without those that are lost,
  /// and starts again when one is back.
  rank_limit fit = nullptr;
  /// @param newest see `run_position::newest`
  /// @param ranks of the whole run
  /// @returns what each rank of this machine runs in the next attempt
  std::function<std::vector<std::string>(bool newest, uint64_t ranks)> command;
};

struct launch_options {
  /// What each rank runs; default: this program with its own arguments.
  std::vector<std::string> command;
  uint64_t ranks = 1;
  node_options nodes;
  /// Its network settings apply to runs over several machines.
  session_config session;
  /// Set for every rank on top of this process's variables.
  std::map<std::string, std::string> environment;
  /// Each rank writes `log_dir`/log-RANK.txt, and rank 0 to the console too.
  /// Ranks know it as `session::run_dir`. Empty: all ranks write to the
  /// console; on machines other than the first: as the first machine has it.
  std::string log_dir;
  /// Serves `log_dir` from before the first rank to the end of the last one, on
  /// the first machine.
  run_server::addresses served;
  /// A signal that ranks block until they handle it; 0: none. SIGUSR1 and
  /// SIGUSR2 are passed on to them.
  int blocked_signal = 0;
  /// An exit code of a rank that, like 0, is a result and not a failure.
  int verdict = 0;
  /// Timeout for each rank to begin its session, or to end. With several
  /// machines, `patience_between_machines` applies instead.
  std::chrono::milliseconds join_limit{30000};
  /// When ranks count as stalled, and what follows; unset: as configured in the
  /// session of rank 0.
  std::optional<stall_options> stalls;
  /// After a failure all ranks are gone within this time.
  std::chrono::milliseconds grace{2000};
  /// After Ctrl-C the ranks have this time for a clean end.
  std::chrono::milliseconds interrupt_grace{30000};
  restart_options restarts;
};

/// Hosts the SUPERVISOR (on the first machine), runs the ranks of this
/// machine and returns when all are gone. The first failure ends all of
/// them, and one line on stderr names the rank and its signal or exit code,
/// or how the ranks are stalled. The line is omitted if rank 0 ended for
/// the same reason with a documented code and has printed the reason
/// itself. The last report of a stall is in `log_dir`/stall.json and the
/// outcome of the run in end.json there; through that folder tools inspect
/// the run while it lasts (docs/inspect.md). Ctrl-C is passed on to the
/// ranks; a second one kills them. Call this from the main thread: the
/// ranks die with the thread that started them, so that even a killed
/// launcher leaves none behind. A run that lost a rank is started again as
/// `restarts` allows (`restart_policy`): the logs go on, and the outcome is
/// that of the last attempt. With several machines the first one decides. The
/// others wait for its word, and if it is gone, as long as they would wait for
/// it at first, for another launcher in its place.
/// @returns the exit code: 0 done, `verdict` if a rank returned it, 3 a
/// rank failed, 4 stalled, 130 interrupted; 2, 4 and 5 as the failed
/// rank returned them
/// @throws error (config) if the command cannot be started, or if several
/// machines would talk over a network that has no keys or is not trusted
int launch(const launch_options& x);

} // namespace smp
