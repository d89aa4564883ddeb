#pragma once

// Which ranks take part in a run: rendezvous and supervision. Free of CAF.

#include "actors/inspection/entry_file.hpp"
#include "actors/protocol/actor_host.hpp"
#include "actors/protocol/introduction.hpp"
#include "actors/stalls/stalls.hpp"
#include "transport/files/run_secret.hpp"
#include "transport/network/tls_relay.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace smp {

/// SUPERVISOR: gathers the ranks of a run, tells each the others' addresses,
/// and tells all of them when one is lost. Lives in the launcher, or in rank 0
/// if another launcher (mpirun, srun) started the processes.
class supervisor_host {
public:
  struct options {
    uint64_t world_size = 1;
    std::string run_id;
    /// A process that does not know it cannot even connect (R44).
    run_secret secret;
    /// A name or an address of this machine; only loopback without `line`.
    std::string address = "127.0.0.1";
    /// 0: any free port.
    uint16_t port = 0;
    std::optional<tls_line> line;
    /// Sent with the secret to peers that have the keys of `line`.
    std::string note;
    /// See `gate::options`.
    std::function<void(const std::string&)> on_refused;
    std::chrono::milliseconds join_limit{30000};
    /// How long a loss waits for `report_down`: a connection breaks before the
    /// launcher knows why the process ended. The report comes at once unless
    /// the machine is busy. 0 if no launcher reports.
    std::chrono::milliseconds report_grace{1000};
    /// Called when a rank is lost or refused, first cause first. On any thread;
    /// must not block.
    std::function<void(const failure&)> on_rank_down;
    /// If not set, the options with which rank 0 joins.
    std::optional<stall_options> stalls;
    /// Called for each stall. On any thread; must not block.
    std::function<void(const stall_report&)> on_stall;
    /// Called when the launcher of another machine has joined, by its index. On
    /// any thread; must not block.
    std::function<void(uint64_t)> on_launcher = [](uint64_t) {};
  };

  /// @throws error (config) if the address is not loopback and there is no
  /// `line`, (transport) if the port cannot be opened
  supervisor_host(actor_host& host, options x);

  /// Unless a rank was lost, waits for the ranks' goodbyes (at most 2 s).
  ~supervisor_host();

  uint16_t port() const;

  /// Lets clients observe the run, read-only. @returns where to connect
  /// @throws error (transport) if the port cannot be opened
  inspection_entry open_inspection();

  /// The launcher saw the process of `x.rank` end: "killed by signal 9
  /// (SIGKILL)". The first report about a rank wins and goes to all others.
  void report_down(const failure& x);

  /// The launcher saw the process of `x.rank` end with a result: as above if
  /// the rank has not left the run before.
  void report_result(const failure& x);

  /// Tells the launchers of other machines whether the run begins again.
  /// @returns the machines whose launchers have heard it, after at most 6 s
  std::vector<uint64_t> tell_course(bool again);

  /// The launcher saw a signal stop or continue the process of a rank. While no
  /// STALL MONITOR runs, this becomes a stall after the same timeout.
  void report_stop(rank_id x, bool stopped);

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

/// The side of one rank.
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
    /// Another rank, or the SUPERVISOR, was lost. Any thread; must not block.
    std::function<void(const failure&)> on_rank_down;
    /// What others may see of this rank. It also hears of a SUPERVISOR that
    /// does not answer.
    watched_rank watch;
    /// Whether to print a silent SUPERVISOR to stderr.
    bool says_silence = false;
    /// @returns the ranks on this machine that a signal stopped; polled until
    /// all have joined. Not set: the launcher watches them.
    std::function<std::vector<rank_id>()> stopped_here;
  };

  membership(actor_host& host, options x);

  /// Counts as a loss for the other ranks unless `leave` was called.
  ~membership();

  /// Waits until all ranks have joined. @returns the members by rank
  /// @throws error naming the missing ranks, or the rank that differs and the
  /// setting in which it does
  std::vector<member> join();

  /// Says goodbye: from now on, the end of this rank is not a loss.
  void leave();

private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

} // namespace smp
