#pragma once

#include "actors/cluster/neighbour_processes.hpp"
#include "actors/protocol/actors.hpp"
#include "actors/stalls/stall_judge.hpp"
#include "transport/wait.hpp"

#include <caf/stateful_actor.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace smp {

struct member_config {
  /// Its `stalls` say for how long the SUPERVISOR may be silent.
  member me;
  supervisor_actor supervisor;
  /// "127.0.0.1:4711", for error texts.
  std::string address;
  std::chrono::milliseconds join_limit{30000};
  std::function<void(const failure&)> on_rank_down;
  /// Hears of a silent SUPERVISOR; if not set, the SUPERVISOR is not polled.
  rank_watch_actor watch;
  /// Prints it: rank 0, which prints other stalls, may be what is stalled.
  bool says_silence = false;
  /// See `membership::options`.
  std::function<std::vector<rank_id>()> stopped_here;
  /// Completes with the answer of the SUPERVISOR.
  std::shared_ptr<awaited<welcome>> joined;
};

struct member_state {
  static inline const char* name = "smp.member";

  using pointer = member_actor::stateful_pointer<member_state>;

  explicit member_state(pointer self) : self(self) {
    // nop
  }

  /// Introduces this rank.
  void join();

  /// Until all ranks have joined, tells the SUPERVISOR which ranks on this
  /// machine a signal stopped or continued: the run may be waiting for these.
  void look_for_stops();

  void on_rank_down(const failure& x);

  void on_supervisor_down();

  /// Polls the SUPERVISOR, which watches all ranks but which nothing else
  /// watches: a stopped process keeps its connections, so no other sign would
  /// show that it is stopped. While the SUPERVISOR is silent, this rank checks
  /// the processes of its neighbours itself.
  void look();
  void on_silence(std::chrono::duration<double> x);

  pointer self;
  member_config config;
  bool leaving = false;
  /// When the unanswered query was sent; empty if none is open.
  std::optional<std::chrono::steady_clock::time_point> asked;
  bool told = false;
  std::set<rank_id> stopped;
  neighbour_processes neighbours;
  std::vector<failure> losses;
};

member_actor::behavior_type member_ear(member_state::pointer self,
                                       member_config config);

} // namespace smp
