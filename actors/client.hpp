#pragma once

// How a program observes a run from outside. Free of CAF in header and source:
// a client connects to a port with a protocol of its own
// (actors/inspection/inspection_port.hpp).

#include "actors/flight/timeline.hpp"
#include "actors/inspection/entry_file.hpp"
#include "actors/protocol/run_status.hpp"
#include "transport/stacks/process_stacks.hpp"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace smp {

/// A read-only connection to a run: it can query what its ranks do and did, and
/// can do nothing else to it.
class run_client {
public:
  /// Connects and passes the gate.
  /// @throws error (transport) if there is no answer within `limit`, naming the
  /// process if it is known to be stopped or gone
  run_client(const inspection_entry& x, std::chrono::milliseconds limit);

  ~run_client();

  run_client(const run_client&) = delete;
  run_client& operator=(const run_client&) = delete;

  /// @throws error (transport) if there is no answer within `limit`, (protocol)
  /// if this build of smp cannot decode it
  run_status ask(std::chrono::milliseconds limit);

  /// @returns the last events of those ranks that answer. Throws as `ask`
  std::vector<flight_log> events(std::chrono::milliseconds limit);

  /// The same, but fewer of each rank. Throws as `ask`
  std::vector<flight_log> recent_events(std::chrono::milliseconds limit);

  /// Makes ranks keep all events from now on, for at most a minute. Throws as
  /// `ask`
  void begin_trace(std::chrono::milliseconds limit);

  /// @returns those of the ranks that answer. Throws as `ask`
  std::vector<flight_log> finish_trace(std::chrono::milliseconds limit);

  /// @returns what the threads of those ranks that answer are doing. Throws as
  /// `ask`
  std::vector<process_stacks> stacks(std::chrono::milliseconds limit);

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

/// @returns whether a process that did not answer in time may still do so: it
/// is elsewhere, or known neither to be stopped nor to be gone
bool may_still_answer(const inspection_entry& x);

/// Which threads, contexts and requests of a run wait for which.
struct wait_report {
  /// The most informative chain of waits, as in docs/stalls.md; empty if
  /// nothing waits.
  std::string chain;
  /// One line per thread, context or request that executes or waits.
  std::vector<std::string> all;
};

wait_report waits_of(const run_status& x);

} // namespace smp
