#pragma once

// How a program looks at a run from outside. Free of CAF, also behind the
// scenes: a client asks at a port that has nothing to do with it
// (actors/inspection/inspection_port.hpp).

#include "actors/inspection/entry_file.hpp"
#include "actors/protocol/run_status.hpp"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace smp {

/// A connection to a run, which can be asked how it does and cannot be told
/// anything.
class run_client {
public:
  /// Connects and passes the gate.
  /// @throws error (transport) if nobody answers within `limit`, naming the
  /// process if it is known to be stopped or gone
  run_client(const inspection_entry& x, std::chrono::milliseconds limit);

  ~run_client();

  run_client(const run_client&) = delete;
  run_client& operator=(const run_client&) = delete;

  /// @throws error (transport) if there is no answer within `limit`, (protocol)
  /// if it is not what this build of smp understands
  run_status ask(std::chrono::milliseconds limit);

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

/// Who waits for whom in a run.
struct wait_report {
  /// The chain of waits that tells most, as in docs/stalls.md; empty if nobody
  /// waits.
  std::string chain;
  /// One line for each who executes or waits.
  std::vector<std::string> all;
};

wait_report waits_of(const run_status& x);

} // namespace smp
