#pragma once

// Who takes part in a run: rendezvous and supervision. Free of CAF.

#include "actors/inspection/entry_file.hpp"
#include "actors/protocol/actor_host.hpp"
#include "actors/protocol/introduction.hpp"
#include "actors/stalls/stalls.hpp"
#include "transport/network/tls_relay.hpp"
#include "transport/run_secret.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// SUPERVISOR: gathers the ranks of a run, tells each the others' addresses,
/// and tells all when one is lost. Lives in the launcher, or in rank 0 where
/// another launcher (mpirun, srun) started the processes.
class supervisor_host {
public:
  struct options {
    uint64_t world_size = 1;
    std::string run_id;
    /// Who does not know it cannot even connect (R44).
    run_secret secret;
    /// A name or an address of this machine; only loopback without `line`.
    std::string address = "127.0.0.1";
    /// 0: any free port.
    uint16_t port = 0;
    std::optional<tls_line> line;
    /// Goes with the secret to whoever has the keys of `line`.
    std::string note;
    std::chrono::milliseconds join_limit{30000};
    /// A connection breaks before the launcher knows why the process ended:
    /// how long a loss waits for `report_down`, which comes at once unless the
    /// machine is busy. 0 where nobody reports.
    std::chrono::milliseconds report_grace{1000};
    /// A rank is lost, or refused (first cause first). Any thread; must not
    /// block.
    std::function<void(const failure&)> on_rank_down;
    /// Not set: as rank 0 says when it joins.
    std::optional<stall_options> stalls;
    /// Hears of each stall. Any thread; must not block.
    std::function<void(const stall_report&)> on_stall;
  };

  /// @throws error (config) if others can reach the address and there is no
  /// `line`, (transport) if nothing can listen there
  supervisor_host(actor_host& host, options x);

  /// Unless a rank was lost, lets the others say goodbye first (at most 2 s).
  ~supervisor_host();

  uint16_t port() const;

  /// Lets clients look at the run, and do nothing else. @returns where
  /// @throws error (transport) if nothing can listen
  inspection_entry open_inspection();

  /// The launcher saw the process of `x.rank` end: "killed by signal 9
  /// (SIGKILL)". The first report about a rank wins and goes to all others.
  void report_down(const failure& x);

  /// The launcher saw a signal stop the process of a rank, or let it go on.
  /// Where no STALL MONITOR looks, it is a stall after the same time.
  void report_stop(rank_id x, bool stopped);

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

/// One rank's side.
class membership {
public:
  struct options {
    std::string address = "127.0.0.1";
    uint16_t port = 0;
    std::optional<tls_line> line;
    run_secret secret;
    member me;
    uint64_t world_size = 1;
    std::chrono::milliseconds join_limit{30000};
    /// Another rank, or the SUPERVISOR, is lost. Any thread; must not block.
    std::function<void(const failure&)> on_rank_down;
    /// What others may see of this rank. It hears, too, of a SUPERVISOR that
    /// does not answer.
    watched_rank watch;
    /// Writes that to stderr.
    bool says_silence = false;
    /// @returns the ranks on this machine that a signal stopped; asked while
    /// not all have joined. Not set: somebody else looks after them.
    std::function<std::vector<rank_id>()> stopped_here;
  };

  membership(actor_host& host, options x);

  /// Unless `leave` was called, the others see a loss.
  ~membership();

  /// Waits for all ranks. @returns the members by rank
  /// @throws error naming the ranks that did not come, or the rank that
  /// differs and in what
  std::vector<member> join();

  /// Says goodbye: the end of this rank is no loss from now on.
  void leave();

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

} // namespace smp
